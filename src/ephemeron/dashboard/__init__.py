"""Live pages of runs, studies, data services and tasks, for a browser: `ephemeron serve dashboard` (docs/dashboard.md).

    log_reader    new lines of a file that grows
    phases        seconds by phase of every function, and pictures of them at any zoom
    means         loss and metrics of every iteration, over ranks
    run_view      an event log as these, read once and then followed;  run_documents: values as JSON
    library       runs and studies below the roots;  studies, services, tasks: other pages
    output        what functions have printed
    ending        ends a run or a trial on request, in a process of its own (stop_process)
    access        token, cookie, Host and Origin: who is let in;  app: routes;  stream: server-sent events;  server: the socket
    static/       pages without a build step, and uPlot (MIT licence)

It reads what runs write and changes nothing, apart from requests to end something. So it may be killed and started at any time.
Pages get aggregates of the size of the picture: kilobytes, however long the log is. Nothing is imported before it is needed, and
starlette, uvicorn and msgspec are an extra (`ephemeron[dashboard]`).
"""
