"""AWS Lambda MicroVMs: one virtual machine of its own for each call, started from a snapshot, for up to eight hours.

As on AWS Lambda a call returns no result, so it is watched, billed and cancelled through records in the run's own channel
(see `functions.async_invoke`). The differences:

    client ── sending ──▶ store
      └─ RunMicrovm (client token, payload) ─▶ MicroVM from the image's snapshot
                                                 │ hook `run`: secrets, random state ──▶ supervisor ──▶ the function's process
                                                 │ begun, events, outcome ──▶ store       (both are in the snapshot)
                                                 ├─ RunMicrovm ─▶ the successor, in a MicroVM of its own
                                                 └─ TerminateMicrovm: itself, as soon as its outcome is in the store
    client ◀── ListMicrovms, GetMicrovm: MicroVMs that ended without an outcome

- **Image.** The snapshot holds the supervisor and a process that has imported PyTorch and has run nothing. Credentials,
  passwords and random state do not exist in it: they come with the hook `run`, or are made there.
- **Idempotence.** The client token of a request is the call's id, so a request that is repeated starts nothing twice.
- **The payload** of the hook has 4,096 bytes in botocore's model; a larger call goes through the store, its secrets never do.
- **No reuse.** A MicroVM that has served a call is terminated. Suspending one for the next call would cost more than a new
  one from the snapshot, in which the imports are made, too: writing 2 GB costs as much as 217 seconds of computing.
- **Suspension** is for whole runs: memory and disk are kept while nothing is computed, until the eight hours are over.
- **Endpoint.** Every MicroVM has one. It is closed (`NO_INGRESS`), unless the image is deployed for a direct channel: then members
  connect to each other through it (`endpoint`).

Without an idle policy: idleness is measured by requests to the endpoint, and a MicroVM that trains gets none.

`boto3` (extra `aws`) is imported on first use. Its model of the service comes with botocore 1.44.
"""
