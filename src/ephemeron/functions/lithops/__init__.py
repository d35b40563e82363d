"""Lithops: functions on the backends of its executors. Only its launching is used.

    client ── sending ──▶ channel       LithopsPlatform, through LithopsSender: the record before the call
      └── FunctionExecutor.call_async ──▶ backend ── run_call ──▶ supervisor ── starts ──▶ the function's process
                                                       │ begun, events, outcome ──▶ channel, as in all clouds
                                                       └ sending ▶ the successor, by an executor of its own
    futures of this client that have ended ──▶ FutureWatch ──▶ Collector

Parameters go through the run's channel. Through Lithops pass calls of a few hundred bytes, once each way. Its defaults
suit short tasks; those that would break long ones are overridden in `settings.overridden`, each with its reason.

Every call is a job of its own, with one task: Lithops' `map` would start a gang with one request, but the run is not a
gang, since functions are replaced and succeeded one by one. On localhost a call costs about a second of start.

When not to use it: where this package has a platform of its own. There, the cloud reports deaths, and a start is one request.
"""
