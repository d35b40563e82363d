"""Ray: each invocation is an actor of its own, with a supervisor that enforces quotas.

    client ── sending ──▶ channel         RayPlatform, through RaySender: the record before the actor
      └────── detached actor ──▶ node     num_cpus and memory reserved during the invocation
                                  │ supervisor (`actor`) ── starts ──▶ the function's process
                                  │ begun, events, outcome ──▶ channel, as in all clouds (`functions.async_invoke`)
                                  └ sending ▶ the successor's actor, by the same RaySender
    Ray ──the actor ended, its node died──▶ ActorWatch ──▶ Collector

Parameters never pass through Ray's object store: functions exchange them through the run's channel, which every node
has to reach, and `preflight` has every node prove that it does. Through Ray pass calls of a few hundred bytes.

Detached actors, because a task or a plain actor ends with its owner: with the client, or with the function that
invoked its successor. Ray's own retries are off, because a function that Ray starts again would be neither the
attempt that peers wait for nor a replacement that the run has asked for: the run replaces a lost function from its
checkpoint.

What Ray reserves it does not enforce: `memory` and `num_cpus` only decide what fits on a node. So the supervisor
watches the memory of the function's process and all that it starts, every 30 ms, and kills it beyond its quota; CPU time
remains unlimited, threads are not (`RayPlatform.unenforced`).

The bill is GB-seconds at the run's prices, from the moment the actor's supervisor runs until its outcome, as on
functions; the cost of an idle cluster is not part of it.

When not to use it: to run without a cluster. A head and its workers are paid for all the time; functions are not.
"""
