"""AWS Lambda: functions that nobody can wait for, told apart, watched and billed through the run's own channel.

An asynchronous invocation answers 202 and nothing more. Everything else that a platform has to know comes back as
*records*, small JSON lines that every voice (each function, each client) puts into the channel under names of its
own. Whoever watches lists them, writes them down and deletes them:

    client ── sending ──▶ store            AwsPlatform, through Sender: the record comes before the request,
      │                                    so that a call can be lost but not forgotten
      └────── Invoke (Event) ──▶ Lambda ──▶ handler
                                             │ begun     create-only: which delivery of the call this is
                                             │ events    what the worker emits, every few seconds
                                             │ sending ▶ Invoke ▶ the successor, by the same Sender
                                             ▼ outcome   status, value, seconds, memory
    store ──list, get, delete──▶ Collector ──▶ events.jsonl (the run's events), calls.jsonl (the records)
    CloudWatch Logs ──REPORT, "timed out", "exited"──▶ Collector

    RUN.calls/VOICE/DELIVERY/NUMBER      records; VOICE is RANK.ATTEMPT.NONCE, or a client's
    RUN.calls/cancel                     the calls that are to end; functions look every few seconds
    RUN.calls/payload.ID                 a call that is too large to be sent

How a call ends, in this order (`state.py`, without I/O): by its outcome; by what the logs say of it, when there is
no outcome although the store was read once more; by silence, when its lifetime and a grace have passed, or when it
has not begun although Lambda was told to drop calls that are a minute old. Billed is what the REPORT line says, if
it comes within a few seconds of the outcome, else what the handler measured, and then a note says so.

Lambda may deliver a call twice: the second delivery finds `begun` taken, goes by the next number, and is fenced off
by the worker like any duplicate. Lambda cannot end a running function: cancelling is a flag. It stops chains of
functions that invoke each other after 16 links: `deploy` allows recursion for this function, since a run of many
hours is such a chain. Retries are set to zero: the run replaces what is lost, from where it stood.

Cost of watching: each function puts one object every `every_s` seconds, and the client lists as often. At 5 seconds
and S3's prices that is $0.0036 an hour for each of them, against $0.10 for a function of 1,769 MB.

`boto3` (extra `aws`) is imported when something is first sent. Credentials come from its usual chain and go nowhere
else: no record, event or payload holds one.
"""
