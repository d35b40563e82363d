"""Asynchronous invocations, watched and billed through the run's own channel.

Common to all platforms on which an invocation is a request that is answered before the function has run: AWS Lambda,
OpenFaaS, Ray, Lithops. The platform learns everything from *records*: small JSON lines that each writer (each function, each
client) puts into the channel under keys of its own. The collector lists them, writes them to files and deletes them:

    client ── sending ──▶ store            AsyncInvokePlatform, through a RecordedSender: the record precedes the
      │                                    request, so that a lost call is known
      └────── request ───▶ cloud ──▶ handler
                                       │ begun     create-only: the number of this delivery of the call
                                       │ events    of the worker, every few seconds
                                       │ sending ▶ request ▶ the successor, by the same sender
                                       ▼ outcome   status, value, seconds, memory
    store ──list, get, delete──▶ Collector ──▶ events.jsonl (the run's events), calls.jsonl (the records)
    cloud ──bills, deaths──▶ log source ──▶ Collector

    RUN.calls/WRITER/DELIVERY/NUMBER     records; WRITER is RANK.ATTEMPT.NONCE, or a client's name
    RUN.calls/cancel                     ids of the calls that are to end; functions check every few seconds
    RUN.calls/payload.ID                 a call that is too large for a request

A call ends, in this order (`call_tracker`, without I/O): by its outcome; by the log source, if there is no
outcome after the store was read once more; by silence, if its lifetime and a margin have passed, or if it has
not begun although the cloud must have dropped or started it by now. Its bill is that of the log source, if it comes
within a few seconds of the outcome, else the handler's own measurement, and then a note says so.

A cloud may deliver a call twice: the second delivery finds `begun` taken, gets the next number, and the worker's fencing
ends it like any duplicate. Cancelling is a flag, which functions see every few seconds.

Cost of watching: each function puts one object every `every_s` seconds, and the client lists as often. At 5 seconds
and S3's prices that is $0.0036 an hour for each of them, against $0.10 for a function of 1,769 MB on AWS Lambda.

A cloud adds a sender, a log source, and where handlers can start processes (`process_supervisor`) the process to start.
"""
