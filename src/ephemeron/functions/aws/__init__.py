"""AWS Lambda: asynchronous invocations, whose ends come through the run's channel (`functions.async_invoke`).

    client ── Invoke (Event) ──▶ Lambda ──▶ handler ── begun, events, outcome ──▶ channel ──▶ Collector
                                               └────── Invoke ──▶ the successor, by the same Sender
    CloudWatch Logs ──REPORT, "timed out", "exited"──▶ LogReader ──▶ Collector

An asynchronous invocation is answered with 202 and no result. Lambda is configured to drop calls that are a minute old, so a
call that has not begun by then never will. The bill is that of the REPORT line.

Lambda may deliver a call twice, and cannot end a running function: duplicates are fenced off, cancelling is a flag. It
stops chains of functions that invoke each other after 16 links: `cloud deploy` allows recursion for this function, since a
run of many hours is such a chain. Retries are set to zero: the run replaces a lost function from its checkpoint.

`boto3` (extra `aws`) is imported on first use. Credentials come from its usual chain; no record, event or payload
contains one.
"""
