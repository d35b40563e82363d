"""OpenFaaS: functions of the user's own cluster, behind a gateway that queues calls and answers 202.

As on AWS Lambda such a call returns no result, so it is watched, billed and cancelled through records in
the run's own channel (see `ephemeron.functions.async_invoke`). The differences:

    client ── sending ──▶ store             OpenFaasPlatform, through GatewaySender
      └─ POST /async-function/NAME ─▶ queue ─▶ gateway ─▶ of-watchdog ─▶ handler (one process per replica)
                                                                          │ begun, events, outcome ──▶ store
                     ◀── X-Callback-Url: status, seconds ── queue-worker  └─▶ the function's process, limited and killed
                         (only where the client can be reached)

- **Two processes in a replica.** The handler is small and never runs the user's code. It starts the process that does
  (the one in which local functions run, too), keeps it warm, kills it at its time limit or when its call is cancelled, and sees its end:
  each end is in the store within a second, without reading logs. of-watchdog alone cannot do this: in HTTP
  mode its `exec_timeout` answers 504 and leaves the process running.
- **The death of a whole replica** is reported by the call-back where there is one, else noticed by silence after the time limit.
- **One call per replica** (`max_inflight=1`): memory is the replica's. The gateway picks replicas whether they are busy or not;
  of-watchdog then answers 429, and the queue-worker tries again (OpenFaaS Standard; the Community Edition drops the
  call, which is noticed as one that has not begun).
- **The bill** is seconds times the memory limit, as the handler measured them: a cluster sends no other.

The gateway's client uses the standard library: a run makes a dozen small requests, none of them on the hot path,
and importing a client library would cost each cold start. The password of the gateway is read from the environment when a
client needs it; functions get none, since invocations need no password.
"""
