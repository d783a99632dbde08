"""Who takes part? Ranks start together, agree, and name the one that dies.

A rank is a process with a device of its own. torchrun starts one a GPU on every node, and starts
all of them again when one dies. What can go wrong between them is settled here:

    start_ranks(timeout)     join the others, whatever a restart has left in torchrun's store
    Groups(timeout)          who communicates with whom, by a key of its rank
    print0(text)             rank 0 says it, for all
    on_all_ranks(check)      all raise what one of them finds, so that none waits for it
    on_rank_0(work)          all have what one does
    check_same(facts)        all raise if they were not started alike
    with Heartbeat(...):     a rank that is dead or unreachable ends the others, with its name

Left out: fewer or more ranks than torchrun has started; its own time-outs; restarts of several
nodes whose torchruns share a store, in which they count differently (README's export avoids it).
"""
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

BEAT_S = 2.0  # between a rank's signs of life
SILENT_BEATS = 10  # without one, that end the others; beats, since hosts' clocks do not matter so

# ---------------------------------------------------------------------------- start


def start_ranks(timeout: float) -> tuple[int, int, int]:
    """Join torchrun's group, or make a group of one (timeout in seconds). Several ranks compute
    with one thread each, one rank with all cores. Returns rank, R and the local rank."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    limit = timedelta(seconds=timeout)
    if "RANK" in os.environ:
        store, rank, world = next(dist.rendezvous("env://", timeout=limit))
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # outlives dead ranks
            store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    else:
        store, rank, world = dist.HashStore(), 0, 1
    dist.init_process_group(backend, timeout=limit, store=store, rank=rank, world_size=world)
    # sums on a CPU depend on the threads that share them, and each launcher has a number of its own
    torch.set_num_threads(1 if world > 1 else len(os.sched_getaffinity(0)))
    return rank, world, int(os.environ.get("LOCAL_RANK", 0))


# ---------------------------------------------------------------------------- groups

# torch 2.13 renames the flat collectives and deprecates the old names, which 2.11 has alone
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def place_of(rank: int, world: int, tp: int, pp: int) -> tuple[int, int, int]:
    """Return a rank's stage, its number among those of its stage and column, and its column."""
    stage, in_stage = divmod(rank, world // pp)
    return stage, *divmod(in_stage, tp)


class Groups:
    """Process groups by name and ranks, made once. Groups of another name have communicators of
    their own, so that what two streams launch does not wait for each other.

    Ranks stand stage by stage (pp of a pipeline), and in a stage tp neighbours have a column of
    each layer's matrices. What shards states or sequences does so among the ranks of one stage and
    one column: `rank` of `ranks` is this one's number there, 0 of R without pp and tp.

        pp = 2, tp = 2     global rank   0  1  2  3     4  5  6  7
                           stage         0  0  0  0     1  1  1  1
                           column        0  1  0  1     0  1  0  1
                           rank          0  0  1  1     0  0  1  1

    timeout: of their collectives; PyTorch's if none is given.
    """

    def __init__(self, timeout: timedelta = timedelta(minutes=10), tp: int = 1,
                 pp: int = 1):
        world = dist.get_world_size()
        self.made: dict[tuple, dist.ProcessGroup] = {}
        self.timeout = timeout
        self.tp = tp
        self.pp = pp
        self.ranks = world // (tp * pp)  # R
        self.places = [place_of(rank, world, tp, pp) for rank in range(world)]
        self.stage, self.rank, self.column = self.places[dist.get_rank()]

    def get(self, name: str, key: Callable[[int], object]) -> dist.ProcessGroup | None:
        """Return the group of the ranks r of this stage and column that have this rank's key(r),
        None if it is alone there. A collective of all ranks."""
        return self.of_places(name, lambda stage, r, column: (stage, column, key(r)))

    def of_places(self, name: str, key: Callable[..., object]) -> dist.ProcessGroup | None:
        """Return the group of the ranks that have this rank's key(stage, r, column), None if it is
        alone there. A collective of all ranks."""
        members: dict = {}
        for rank, place in enumerate(self.places):
            members.setdefault(key(*place), []).append(rank)
        mine = members[key(self.stage, self.rank, self.column)]
        for ranks in members.values():
            if len(ranks) == 1 or (name, *ranks) in self.made:
                continue
            group = dist.new_group(ranks, timeout=self.timeout)
            self.made[name, *ranks] = group
            if ranks == mine and torch.cuda.is_initialized():
                # NCCL takes its memory now, not amid a step that leaves it none
                one = torch.zeros(1, device="cuda")
                all_gather(one.new_empty(len(ranks)), one, group=group)
                dist.all_reduce(one, group=group)
        return self.made.get((name, *mine))


# ---------------------------------------------------------------------------- agree


class ConfigError(ValueError):
    """Bad input, found before any work, raised on all ranks alike."""


def print0(*text, **options) -> None:
    """Print on rank 0 alone; where there are no ranks, here."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(*text, **options)


def on_all_ranks(check, group: dist.ProcessGroup | None = None):
    """Return check() of every rank; if one fails, the same ConfigError on all: none hangs. They
    wait for each other as long as the group does. A collective; check holds none."""
    result = None
    error = ""
    try:
        result = check()
    except (ValueError, OSError, MemoryError) as e:
        error = str(e)
    if error := error_of_any(error, group):
        raise ConfigError(error)
    return result


def on_rank_0(work, group: dist.ProcessGroup | None = None):
    """Return on all ranks what work() returns on rank 0, or raise as on_all_ranks does. A
    collective of all ranks."""
    return of_rank_0(on_all_ranks(lambda: None if dist.get_rank() else work(), group))


def of_rank_0(value):
    """Return rank 0's value on all ranks. A collective of all ranks."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def most_of_ranks(value: float, device: torch.device) -> float:
    """Return the largest of all ranks' numbers. A collective of all ranks."""
    most = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


def error_of_any(error: str, group: dist.ProcessGroup | None = None) -> str:
    """Return the first error of any rank, with the ranks that have one; "" if none has. A
    collective of all ranks."""
    errors = [""] * dist.get_world_size()
    dist.all_gather_object(errors, error, group)
    failed = [rank for rank, text in enumerate(errors) if text]
    if not failed:
        return ""
    where = "" if len(failed) == len(errors) else f" (on ranks {failed})"
    return errors[failed[0]] + where


def patient_group() -> dist.ProcessGroup:
    """Return a group of all ranks that wait for one that works alone, longer than --timeout: a dead
    one the heartbeat finds. A collective of all ranks."""
    return dist.new_group(timeout=timedelta(days=30), backend="gloo")


def check_same(facts: dict[str, object]) -> None:
    """Raise ConfigError on all ranks, naming what is not the same on all of them. A collective."""
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, facts)
    differ = [f"{name} is {every[0][name]} on rank 0, {theirs[name]} on rank {rank}"
              for name in facts for rank, theirs in enumerate(every)
              if theirs[name] != every[0][name]]
    if differ:
        more = f", and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise ConfigError(f"ranks were started differently: {'; '.join(differ[:3])}{more}")


# ---------------------------------------------------------------------------- a rank that dies


class Heartbeat:
    """Ends this process by the name of a rank that is dead or unreachable: a collective with it
    would hang. For the time of a `with`.

    A thread writes a sign to the store, whatever the main thread waits for, and reads those of all
    ranks: how often they have beaten, and their names; "" of one that has ended well. A second
    thread watches that the first comes back: a store on a lost node hangs or raises.
    """

    def __init__(self, rank: int, world: int, advice: str):
        """advice: what a rank says that ends."""
        self.rank = rank
        self.world = world
        self.advice = advice
        self.name = f"rank {rank} on host {os.uname().nodename} (process {os.getpid()})"
        self.beats = 0
        self.over = threading.Event()
        self.ended_well = False
        self.talking = threading.Thread(target=self.talk, daemon=True)

    def __enter__(self) -> None:
        if self.world > 1:
            # a client of its own: in another's, a call of the main thread that waits holds a lock
            self.store = dist.distributed_c10d._get_default_store().clone()
            on_all_ranks(self.beat)  # so each has a sign to read
            self.talking.start()
            threading.Thread(target=self.watch_store, daemon=True).start()

    def beat(self) -> None:
        self.beats += 1
        self.store.set(f"beat-{self.rank}", f"{self.beats} {self.name}")

    def talk(self) -> None:
        keys = [f"beat-{rank}" for rank in range(self.world)]
        last = self.world * [b""]
        silent = self.world * [0]  # beats without a new sign
        with contextlib.suppress(RuntimeError):  # of the store: watch_store misses this thread
            while not self.over.wait(BEAT_S):
                self.beat()
                signs = self.store.multi_get(keys)
                for rank, sign in enumerate(signs):
                    silent[rank] = silent[rank] + 1 if sign and sign == last[rank] else 0
                    if silent[rank] == SILENT_BEATS:
                        name = sign.decode().partition(" ")[2]
                        self.end(f"{name} gave no sign for {SILENT_BEATS * BEAT_S:.0f} s: it is "
                                 "dead or unreachable")
                last = signs
            if self.ended_well:
                self.store.set(f"beat-{self.rank}", "")

    def watch_store(self) -> None:
        last = silent = 0
        while not self.over.wait(BEAT_S):
            silent = silent + 1 if self.beats == last else 0
            last = self.beats
            if silent == SILENT_BEATS:
                self.end(f"the store on rank 0's node, {os.environ['MASTER_ADDR']}, has not "
                         f"answered for {silent * BEAT_S:.0f} s: rank 0 or its node is dead or "
                         "unreachable")

    def end(self, cause: str) -> None:
        print(f"rank {self.rank}: {cause}; this run ends. {self.advice}", file=sys.stderr,
              flush=True)
        sys.stdout.flush()
        time.sleep(2 * BEAT_S)  # others find the same, in a store that may be here
        os._exit(1)

    def __exit__(self, kind, error, _) -> None:
        if self.world > 1:
            self.ended_well = error is None or isinstance(error, ConfigError)  # all have raised it
            if not self.ended_well:
                signal.alarm(10)  # an exit waits for communicators, and they may wait for a rank
            self.over.set()
            self.talking.join(2 * BEAT_S)
