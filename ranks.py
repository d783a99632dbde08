"""Who takes part? Ranks start together, agree, and name the one that dies.

A rank is a process with a device of its own. torchrun starts one a GPU on every node, and starts
all of them again when one dies. What can go wrong between them is settled here:

    use_more_queues()        a stream's messages hold up no other stream, on a GPU
    start_ranks(timeout)     join the others, whatever a restart has left in torchrun's store
    Groups(timeout)          who communicates with whom, by a key of its rank
    print0(text)             rank 0 says it, for all
    all_or_none(check, x)   all raise what check(x) of one of them finds, so that none waits for it
    on_rank_0(work, x)       all have what work(x) of one returns
    gather_objects(value)      all know all
    check_same(facts)        all raise if they were not started alike
    with heartbeat(...):     a rank that is dead or unreachable ends the others, with its name

Left out: fewer or more ranks than torchrun has started; its own time-outs; restarts of several
nodes whose torchruns share a store, in which they count differently (README's export avoids it).
"""

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

BEAT_S = 2.0  # between a rank's signs of life
SILENT_BEATS = 10  # without one, that end the others; beats, since hosts' clocks do not matter so

# ---------------------------------------------------------------------------- start


def use_more_queues() -> None:
    """Let each stream have a hardware queue of its own, of which a GPU has 8 by default: a message
    that waits must not hold up the one that it waits for. Before CUDA starts."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def start_ranks(timeout: float) -> tuple[int, int, int]:
    """Join torchrun's group, or make a group of one (timeout in seconds). Several ranks compute
    with one thread each; one rank with OMP_NUM_THREADS, or all cores. Returns rank, R and the local
    rank."""
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
    if world > 1:
        torch.set_num_threads(1)
    elif "OMP_NUM_THREADS" not in os.environ:  # which PyTorch has read
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    return rank, world, dist.get_node_local_rank(0)


# ---------------------------------------------------------------------------- groups

Group = dist.ProcessGroup | None  # None: all ranks; or one that is alone

# torch 2.13 renames the flat collectives and deprecates the old names, which 2.11 has alone
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Groups:
    """Process groups by name and ranks, made once. Groups of another name have communicators of
    their own, so that what two streams launch does not wait for each other.

    Ranks stand stage by stage (pp of a pipeline), and in a stage tp neighbours have a column of
    each layer's matrices. What shards states or sequences does so among the ranks of one stage and
    one column: `rank` of `ranks` is this one's number there.

        pp = 2, tp = 2     global rank   0  1  2  3     4  5  6  7
                           stage         0  0  0  0     1  1  1  1
                           tp_rank       0  1  0  1     0  1  0  1
                           rank          0  0  1  1     0  0  1  1

    timeout: of their collectives, in seconds.
    """

    def __init__(self, timeout: float = 600.0, tp: int = 1, pp: int = 1):
        self.made = {}  # this rank's, by name and all groups of it
        self.timeout = timedelta(seconds=timeout)
        self.tp = tp
        self.pp = pp
        self.ranks = dist.get_world_size() // (tp * pp)  # R
        self.positions = [*itertools.product(range(pp), range(self.ranks), range(tp))]  # by rank
        self.stage, self.rank, self.tp_rank = self.positions[dist.get_rank()]
        if torch.cuda.is_initialized():  # as below
            dist.all_reduce(torch.zeros(1, device="cuda"))

    def get(self, name: str, key: Callable) -> Group:
        """Return the group of the ranks r of this stage and column that have this rank's key(r),
        None if it is alone there. A collective of all ranks."""
        return self.by_position(name, lambda stage, r, tp_rank: (stage, tp_rank, key(r)))

    def by_position(self, name: str, key: Callable) -> Group:
        """Return the group of the ranks that have this rank's key(stage, r, tp_rank), None if it is
        alone there. A collective of all ranks."""
        members = {}
        for rank, place in enumerate(self.positions):
            members.setdefault(key(*place), []).append(rank)
        several = [ranks for ranks in members.values() if len(ranks) > 1]
        made = name, str(several)
        if several and made not in self.made:
            self.made[made], _ = dist.new_subgroups_by_enumeration(several, self.timeout)
        group = self.made.get(made)
        if group and torch.cuda.is_initialized():
            # NCCL takes its memory now, not amid a step that leaves it none
            one = torch.zeros(1, device="cuda")
            all_gather(one.new_empty(group.size()), one, group=group)
            dist.all_reduce(one, group=group)
        return group


# ---------------------------------------------------------------------------- agree


class ConfigError(ValueError):
    """Bad input, found before any work, raised on all ranks alike."""


def print0(*text) -> None:
    """Print on rank 0 alone; where there are no ranks, here."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            print(*text, flush=True)
        except BrokenPipeError:  # Ctrl-C has ended the `tee` that reads it: the run still saves
            sys.stdout = open(os.devnull, "w")


def gather_objects(value, group: Group = None) -> list:
    """Return what each rank gives, by rank. A collective of all ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group)
    return values


def first_error(error: str, group: Group = None) -> str:
    """Return the first error of any rank, with the ranks that have one; "" if none has. A
    collective of all ranks."""
    return first_of(gather_objects(error, group))


def first_of(errors: list[str]) -> str:
    """Return the first error of a list by rank, with the ranks that have one if not all do; "" if
    none has."""
    failed = [rank for rank, text in enumerate(errors) if text]
    if not failed or all(errors):
        return errors[0]
    return f"{errors[failed[0]]} (on ranks {failed})"


class UnexpectedError(RuntimeError):
    """An exception that no check foresees, most likely a bug: the traceback of the first rank that
    raised it, raised on all ranks alike."""


def all_or_none(check, *args, group: Group = None):
    """Return what check(*args) returns on this rank, if it fails on no rank. Otherwise all ranks
    raise the same error, so that none waits for another:

        ValueError, OSError, MemoryError    ConfigError: what a user can mend
        torch.OutOfMemoryError              torch.OutOfMemoryError, on all ranks
        any other Exception                 UnexpectedError, with the traceback

    If ranks fail in different ways, UnexpectedError comes before out of memory, and that before
    ConfigError.

    Ranks wait for each other as long as the group does. A collective, and check holds none."""
    result = kind = text = ""
    try:
        result = check(*args)
    except (ValueError, OSError, MemoryError) as e:
        kind, text = "config", str(e) or "out of memory"  # which may have no text
    except torch.OutOfMemoryError as e:
        kind, text = "memory", str(e)
    except Exception:
        kind, text = "bug", f"rank {dist.get_rank()}: {traceback.format_exc()}"
    found = gather_objects((kind, text), group)
    for kind, error in (
        ("bug", UnexpectedError),
        ("memory", torch.OutOfMemoryError),
        ("config", ConfigError),
    ):
        texts = [text if of_rank == kind else "" for of_rank, text in found]
        if any(texts):
            raise error(first_of(texts))
    return result


def on_rank_0(work, *args, group: Group = None):
    """Return on all ranks what work(*args) returns on rank 0, or raise as all_or_none does. A
    collective of all ranks."""
    # what others have is not read
    result = all_or_none(lambda: dist.get_rank() or work(*args), group=group)
    return gather_objects(result, group)[0]


def patient_group() -> dist.ProcessGroup:
    """Return a group of all ranks that wait for one that works alone, longer than --timeout: a dead
    one the heartbeat finds. A collective of all ranks."""
    return dist.new_group(timeout=timedelta(days=30), backend="gloo")


def check_same(facts: dict[str, object]) -> None:
    """Raise ConfigError on all ranks, naming a fact that is not the same on all of them. A
    collective."""
    first, *others = gather_objects(facts)
    for rank, theirs in enumerate(others, 1):
        for name, value in theirs.items():
            if value != first[name]:
                raise ConfigError(
                    f"ranks were started differently: {name} is {first[name]} on rank 0, {value} "
                    f"on rank {rank}"
                )


# ---------------------------------------------------------------------------- a rank that dies


@contextlib.contextmanager
def heartbeat(rank: int, world: int, advice: str):
    """End this process by the name of a rank that is dead or unreachable: a collective with it
    would hang. A collective of all ranks.

    A thread writes a sign to the store, whatever the main thread waits for, and reads those of all
    ranks: their names, and the time; "" of one that has ended well. A timer runs while the store
    answers: on a lost node it hangs, or raises.
    """
    if world == 1:
        yield
        return
    # a client of its own: in another's, a call of the main thread that waits holds a lock
    store = dist.distributed_c10d._get_default_store().clone()
    keys = [f"beat-{r}" for r in range(world)]
    own = f"rank {rank} on host {os.uname().nodename} (process {os.getpid()})"
    over = threading.Event()
    silent = f"for {SILENT_BEATS * BEAT_S:.0f} s"
    no_store = (
        f"the store on rank 0's node, {os.environ['MASTER_ADDR']}, has not answered "
        f"{silent}: rank 0 or its node"
    )

    def end(cause):
        if over.is_set():
            return
        print(
            f"rank {rank}: {cause} is dead or unreachable; this run ends. {advice}",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(2 * BEAT_S)  # others find the same, in a store that may be here
        os._exit(1)

    def beat():
        history = deque(maxlen=SILENT_BEATS + 1)  # of all signs
        while not over.wait(BEAT_S):
            timer = threading.Timer(SILENT_BEATS * BEAT_S, end, [no_store])
            timer.daemon = True
            timer.start()
            try:
                store.set(keys[rank], f"{own}: {time.monotonic()}")
                history.append(store.multi_get(keys))
            except RuntimeError:  # the timer goes on
                return
            timer.cancel()
            for then, sign in zip(history[0], history[-1]):
                if then == sign != b"" and len(history) > SILENT_BEATS:
                    end(f"{sign.decode().partition(':')[0]} gave no sign {silent}: it")
        with contextlib.suppress(RuntimeError):  # a store that has gone, too
            store.set(keys[rank], "")

    all_or_none(store.set, keys[rank], own)  # so each has a sign to read
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    refused = None
    try:
        yield
    except (ConfigError, UnexpectedError) as error:
        refused = error  # raised by all ranks
    except BaseException:
        signal.alarm(10)  # an exit waits for communicators, and they may wait for a rank
        raise
    over.set()
    thread.join(2 * BEAT_S)
    if refused:
        raise refused
