"""Keys of all objects of a run in its channel. Deterministic, so that the hot path never lists.

RUN/spec  RUN/code  RUN/init               prepared by the driver, read once per function
RUN/data/RANK  RUN/test/RANK
RUN/claim/RANK/ATTEMPT                     create-only: lease to launch this attempt
RUN/replaced/NUMBER                        create-only: functions of the run that were replaced
RUN/start/RANK/ATTEMPT                     create-only: invocation that is this attempt
RUN/gGROUP/ITERATION.c.FROM.SHARD          contributions (dots: a folder must not fill with empty folders)
RUN/gGROUP/ITERATION.m.SHARD               merged shards; a group is a stage, 0 where there are none
RUN/state/RANK/ITERATION                   checkpoints, two per rank
RUN/hand/RANK/ATTEMPT                      iteration at which the next attempt takes over
RUN/evaluation/ITERATION.RANK              evaluation of a rank's slice, where functions merge them
RUN/measured/ITERATION                     metrics of the whole evaluation data
RUN/kept/ITERATION                         weights of an evaluation that are kept
RUN/done/RANK  RUN/result                  the end
RUN/control                                requests of the user during the run
RUN/peer/GENERATION/RANK.ATTEMPT           where a function can be reached by the others, on direct channels
RUN/waiting/GENERATION/RANK.ATTEMPT        the same of a successor that is no member yet
RUN/mail/GENERATION/FROM.ATTEMPT-TO.ATTEMPT/NUMBER   messages of functions that cannot connect

For a run whose functions change (generations; in those after the first, gGROUP and state/RANK end in .GENERATION):
RUN/generation/GENERATION                  who its members are, and its first iteration
RUN/begin/GENERATION                       the state in which it begins
RUN/left/GENERATION/RANK                   a rank needs nothing of that generation any more
RUN/over/GENERATION                        no rank does; its objects are deleted

For a run that is one region of several: RUN/region/…, see `ephemeron.regions.records`.

For a model that is partitioned into stages:
RUN/stage/STAGE  RUN/initial/STAGE         its description, and its initial weights
RUN/x/ITERATION.WHAT.SOURCE.TARGET.REPLICA.MICRO_BATCH   values from stage to stage; see `worker.pipeline.activation_codec`
RUN/wait/RANK                              ranks that a rank has waited for too long, and since when
RUN/part/STAGE                             its final weights
"""

from __future__ import annotations

from dataclasses import dataclass

SIGNED = frozenset(
    {"spec", "code", "init", "data", "test", "state", "result", "kept", "stage", "initial", "part", "generation", "begin", "region"}
)
"""Kinds of objects that are signed with the run's key: all that is executed or decoded into a program's state."""


def is_signed(key: str) -> bool:
    """Whether the object of a run is signed; see `communication.signing`."""
    parts = key.split("/", 2)
    return len(parts) > 1 and parts[1] in SIGNED


PUT_AGAIN = frozenset(
    {
        "claim",
        "control",
        "done",
        "evaluation",
        "hand",
        "kept",
        "left",
        "mail",
        "measured",
        "over",
        "part",
        "peer",
        "replaced",
        "result",
        "start",
        "state",
        "wait",
        "waiting",
        "x",
    }
)
"""Kinds of objects of a run that are put again where they are missed, by a replacement or from an older checkpoint, or whose existence
alone counts. So are contributions and merged shards (`gGROUP`)."""
_PUT_AGAIN_OF = {
    "groups": frozenset({"absent", "entrance", "left", "members", "snapshot"}),
    "region": frozenset({"leave", "loaded", "released", "waiting"}),
}
"""The same of the objects of regions; their updates and decisions are none of these."""


def is_put_again(key: str) -> bool:
    """Whether the damage of a run's object counts as its absence; see `object_frame.Framed`."""
    _, kind, name, *_ = *key.split("/"), "", ""
    return kind in PUT_AGAIN or (kind[:1] == "g" and kind[1:2].isdigit()) or name in _PUT_AGAIN_OF.get(kind, ())


def is_merged(key: str) -> bool:
    """Whether a key is that of a merged shard."""
    _, kind, name, *_ = *key.split("/"), "", ""
    return kind[:1] == "g" and kind[1:2].isdigit() and ".m." in name


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of one run."""

    run: str
    group: int = 0
    """Group of the contributions and merged shards."""
    generation: int = 0
    """Generation of contributions, merged shards and checkpoints."""

    @property
    def spec(self) -> str:
        return f"{self.run}/spec"

    @property
    def code(self) -> str:
        return f"{self.run}/code"

    @property
    def init(self) -> str:
        return f"{self.run}/init"

    @property
    def result(self) -> str:
        return f"{self.run}/result"

    @property
    def control(self) -> str:
        return f"{self.run}/control"

    def data(self, rank: int) -> str:
        return f"{self.run}/data/{rank}"

    def test(self, rank: int) -> str:
        return f"{self.run}/test/{rank}"

    def claim(self, rank: int, attempt: int) -> str:
        return f"{self.run}/claim/{rank}/{attempt}"

    def claims(self, rank: int) -> str:
        return f"{self.run}/claim/{rank}/"

    def starts(self, rank: int) -> str:
        return f"{self.run}/start/{rank}/"

    def hands(self, rank: int) -> str:
        return f"{self.run}/hand/{rank}/"

    @property
    def replacements(self) -> str:
        return f"{self.run}/replaced/"

    def replacement(self, number: int) -> str:
        return f"{self.run}/replaced/{number:06d}"

    @property
    def peers(self) -> str:
        """Prefix of the announcements of a generation's functions."""
        return f"{self.run}/peer/{self.generation}/"

    def peer(self, rank: int, attempt: int) -> str:
        return f"{self.peers}{rank}.{attempt}"

    @property
    def waiting(self) -> str:
        """Prefix of the announcements of successors that wait for their predecessors."""
        return f"{self.run}/waiting/{self.generation}/"

    def waiting_peer(self, rank: int, attempt: int) -> str:
        return f"{self.waiting}{rank}.{attempt}"

    def mail(self, sender: str, target: str) -> str:
        """Prefix of the messages from one function to another, each named RANK.ATTEMPT."""
        return f"{self.run}/mail/{self.generation}/{sender}-{target}/"

    def start(self, rank: int, attempt: int) -> str:
        return f"{self.starts(rank)}{attempt}"

    def contribution(self, iteration: int, rank: int, shard: int | str) -> str:
        return f"{self.exchanged}{iteration}.c.{rank}.{shard}"

    @property
    def exchanged(self) -> str:
        """Prefix of all contributions and merged shards of the group."""
        return f"{self.run}/g{self.group}{self._suffix}/"

    @property
    def _suffix(self) -> str:
        return f".{self.generation}" if self.generation else ""

    def merged(self, iteration: int, shard: int | str) -> str:
        return f"{self.exchanged}{iteration}.m.{shard}"

    def state(self, rank: int, iteration: int) -> str:
        return f"{self.states(rank)}{iteration:09d}"

    def states(self, rank: int) -> str:
        return f"{self.run}/state/{rank}{self._suffix}/"

    @property
    def generations(self) -> str:
        return f"{self.run}/generation/"

    def members(self, generation: int) -> str:
        return f"{self.generations}{generation:06d}"

    @property
    def begins(self) -> str:
        return f"{self.run}/begin/"

    def begin(self, generation: int) -> str:
        return f"{self.begins}{generation}"

    def over(self, generation: int) -> str:
        return f"{self.run}/over/{generation}"

    def all_left(self, generation: int) -> str:
        """Prefix of the marks of all ranks that have left a generation."""
        return f"{self.run}/left/{generation}/"

    def left(self, generation: int, rank: int) -> str:
        return f"{self.all_left(generation)}{rank}"

    def hand(self, rank: int, attempt: int) -> str:
        return f"{self.hands(rank)}{attempt}"

    def evaluation(self, iteration: int, rank: int) -> str:
        return f"{self.run}/evaluation/{iteration}.{rank}"

    def measured(self, iteration: int) -> str:
        return f"{self.run}/measured/{iteration}"

    @property
    def all_kept(self) -> str:
        """Prefix of all weights that are kept."""
        return f"{self.run}/kept/"

    def kept(self, iteration: int) -> str:
        return f"{self.run}/kept/{iteration:09d}"

    @property
    def dones(self) -> str:
        return f"{self.run}/done/"

    def done(self, rank: int) -> str:
        return f"{self.run}/done/{rank}"

    def stage(self, stage: int) -> str:
        return f"{self.run}/stage/{stage}"

    def initial(self, stage: int) -> str:
        return f"{self.run}/initial/{stage}"

    def between(self, iteration: int, what: str, source: int, target: int, replica: int, micro_batch: int) -> str:
        return f"{self.run}/x/{iteration}.{what}.{source}.{target}.{replica}.{micro_batch}"

    def wait(self, rank: int) -> str:
        return f"{self.run}/wait/{rank}"

    def probe(self, name: str) -> str:
        """Below which the client measures the store before a run."""
        return f"{self.run}/probe/{name}"

    def part(self, stage: int) -> str:
        return f"{self.run}/part/{stage}"
