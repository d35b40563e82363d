"""Functions that nobody can wait for, told apart, watched and billed through the run's own channel.

Common to all platforms on which an invocation is a request that is answered before it has run: AWS Lambda, OpenFaaS,
Ray, Lithops. Everything that a platform has to know comes back as *records*, small JSON lines that every voice (each
function, each client) puts into the channel under names of its own. Whoever watches lists them, writes them down and
deletes them:

    client ── sending ──▶ store            RecordedPlatform, through a RecordedSender: the record comes before the
      │                                    request, so that a call can be lost but not forgotten
      └────── request ───▶ cloud ──▶ handler
                                       │ begun     create-only: which delivery of the call this is
                                       │ events    what the worker emits, every few seconds
                                       │ sending ▶ request ▶ the successor, by the same sender
                                       ▼ outcome   status, value, seconds, memory
    store ──list, get, delete──▶ Collector ──▶ events.jsonl (the run's events), calls.jsonl (the records)
    cloud ──bills, deaths──▶ Witness ──▶ Collector

    RUN.calls/VOICE/DELIVERY/NUMBER      records; VOICE is RANK.ATTEMPT.NONCE, or a client's
    RUN.calls/cancel                     the calls that are to end; functions look every few seconds
    RUN.calls/payload.ID                 a call that is too large to be sent

How a call ends, in this order (`call_tracker`, without I/O): by its outcome; by what a witness says of it, when there is no
outcome although the store was read once more; by silence, when its lifetime and a grace have passed, or when it has
not begun although the cloud should have dropped or started it by now. Billed is what the witness says, if it comes
within a few seconds of the outcome, else what the handler measured, and then a note says so.

A cloud may deliver a call twice: the second delivery finds `begun` taken, goes by the next number, and is fenced off by
the worker like any duplicate. Cancelling is a flag, which functions see every few seconds.

Cost of watching: each function puts one object every `every_s` seconds, and the client lists as often. At 5 seconds
and S3's prices that is $0.0036 an hour for each of them, against $0.10 for a function of 1,769 MB on AWS Lambda.

A cloud adds a sender, a witness, and where its handlers are processes of ours (`process_supervisor`) what starts them.
"""
