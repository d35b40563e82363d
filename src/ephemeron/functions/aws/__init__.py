"""AWS Lambda: asynchronous invocations, whose ends come through the run's channel (`functions.async_invoke`).

    client ── Invoke (Event) ──▶ Lambda ──▶ handler ── begun, events, outcome ──▶ channel ──▶ Collector
                                               └────── Invoke ──▶ the successor, by the same Sender
    CloudWatch Logs ──REPORT, "timed out", "exited"──▶ LogReader ──▶ Collector

An asynchronous invocation answers 202 and nothing more. Lambda is told to drop calls that are a minute old, so one that
has not begun by then never will. Billed is what the REPORT line says.

Lambda may deliver a call twice, and cannot end a running function: duplicates are fenced off, cancelling is a flag. It
stops chains of functions that invoke each other after 16 links: `deploy` allows recursion for this function, since a
run of many hours is such a chain. Retries are set to zero: the run replaces what is lost, from where it stood.

`boto3` (extra `aws`) is imported when something is first sent. Credentials come from its usual chain and go nowhere
else: no record, event or payload holds one.
"""
