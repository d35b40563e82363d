"""OpenFaaS: functions of one's own cluster, behind a gateway that queues calls and answers 202.

As on AWS Lambda nobody can wait for such a call, so it is told apart, watched, billed and cancelled through records in
the run's own channel (see `ephemeron.functions.async_invoke`). What differs:

    client ── sending ──▶ store             OpenFaasPlatform, through GatewaySender
      └─ POST /async-function/NAME ─▶ queue ─▶ gateway ─▶ of-watchdog ─▶ handler (ours, one process a replica)
                                                                          │ begun, events, outcome ──▶ store
                     ◀── X-Callback-Url: status, seconds ── queue-worker  └─▶ the function's process, limited and killed
                         (only where the client can be reached)

- **Two processes in a replica.** The handler is small and never runs the user's code. It starts the process that does
  (the one in which local functions run, too), keeps it warm, kills it at its lifetime or when its call is cancelled, and sees it die:
  an end is in the store within a second, by whatever death, without reading logs. of-watchdog alone could not: in HTTP
  mode its `exec_timeout` answers 504 and leaves the process running.
- **What neither sees**, the death of a whole replica, comes by the call-back where there is one, else by silence after the lifetime.
- **One call a replica** (`max_inflight=1`): memory is the replica's. The gateway picks replicas without regard to who is busy;
  of-watchdog then answers 429, and the queue-worker tries again (OpenFaaS Standard; the Community Edition drops the
  call, which is noticed as one that has not begun).
- **The bill** is seconds times the memory limit, as the handler measured them: a cluster sends no other.

The gateway is spoken to with the standard library: a run makes a dozen small requests, none of them on the hot path,
and a client library would cost every cold start its import. The password of the gateway is read from the environment when a
client needs it; functions get none, since invocations are open to whoever reaches the gateway.
"""
