"""Start the ranks, let them agree, and name a rank that dies.

A rank is a process with a device of its own. torchrun starts one rank per GPU on every node, and
restarts all of them when one dies. This file settles what can go wrong between them:

    use_more_queues()         let no CUDA stream hold up another one
    start_ranks(timeout)      join the other ranks, also after a restart
    Groups(timeout)           make process groups: ranks with the same key communicate
    print0(text)              print on rank 0 only
    all_or_none(check, x)     run check(x) on all ranks; if it fails on one, all ranks raise
    on_rank_0(work, x)        run work(x) on rank 0 only; all ranks get its result
    gather_objects(value)     all ranks get the values of all ranks
    first_error(text)         all ranks get the first error of any rank
    check_same(facts)         all ranks raise if they were not started alike
    patient_group()           a group that waits for a rank longer than --timeout
    with heartbeat(...):      if a rank is dead or unreachable, the remaining ranks name it and end

If a check fails on one rank only, the remaining ranks go on to a collective that this rank never
joins. So a check that may do this goes through all_or_none:

    device = all_or_none(choose_device, cfg, local_rank)    # rank 5 has none: all ranks raise

Left out: another number of ranks after a restart; torchrun's own time-outs; restarts of several
nodes whose torchruns share one store. There the torchruns count restarts differently, which
README's `export` for several nodes avoids.
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

BEAT_S = 2.0  # seconds between two beats of a rank
SILENT_BEATS = 10  # beats without a sign of a rank, after which the remaining ranks end. Each rank
# counts its own beats and compares no times, so hosts' clocks may differ

# ---------------------------------------------------------------------------- start


def use_more_queues() -> None:
    """Give each CUDA stream a hardware queue of its own. Call this before CUDA starts.

    By default a GPU has 8 queues, which streams share. Then a message that waits could hold up the
    message that it waits for.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def start_ranks(timeout: float) -> tuple[int, int, int]:
    """Join torchrun's ranks, or start as the only rank. Returns (rank, world size, local rank).

    timeout: of collectives, in seconds. On a CPU, several ranks compute with one thread each; a
    single rank uses OMP_NUM_THREADS threads, or as many as it has cores.
    """
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    limit = timedelta(seconds=timeout)
    if "RANK" in os.environ:
        store, rank, world = next(dist.rendezvous("env://", timeout=limit))
        # torchrun's store outlives dead ranks: each start gets keys of its own in it
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    else:
        store, rank, world = dist.HashStore(), 0, 1
    dist.init_process_group(backend, timeout=limit, store=store, rank=rank, world_size=world)

    # On a CPU, the rounding of a sum depends on the number of threads, and launchers choose
    # different numbers. So the number is fixed here, and losses are reproducible.
    if world > 1:
        torch.set_num_threads(1)
    elif "OMP_NUM_THREADS" not in os.environ:  # PyTorch has read it already
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    return rank, world, dist.get_node_local_rank(0)


# ---------------------------------------------------------------------------- groups

# None as an argument of a collective: all ranks; None from Groups: this rank is alone
Group = dist.ProcessGroup | None

# torch 2.13 renames the flat collectives and deprecates the old names; 2.11 has only the old names
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Groups:
    """The process groups of this rank, each made once.

    Groups with different names have different communicators, so what two streams launch does not
    wait for each other.

    Ranks are numbered stage by stage (`stage`, of pp in a pipeline). In a stage, tp neighbours are
    a tensor-parallel group, and `tp_rank` is a rank's number in it. Model states and sequences are
    shared by the ranks with the same stage and tp_rank. `rank` (0 ... `ranks` - 1) is a rank's
    number among them.

        pp = 2, tp = 2     global rank   0  1  2  3     4  5  6  7
                           stage         0  0  0  0     1  1  1  1
                           tp_rank       0  1  0  1     0  1  0  1
                           rank          0  0  1  1     0  0  1  1

    A group is asked for by a key: ranks with the same key are a group. In this example

        groups.get("pairs", lambda r: r // 2)
            global ranks {0, 2}, {1, 3}, {4, 6}, {5, 7}
        groups.by_position("tensor", lambda stage, r, tp_rank: (stage, r))
            global ranks {0, 1}, {2, 3}, {4, 5}, {6, 7}

    timeout: of collectives, in seconds.
    """

    def __init__(self, timeout: float = 600.0, tp: int = 1, pp: int = 1):
        self.made = {}  # (name, all groups of that name) -> this rank's group
        self.timeout = timedelta(seconds=timeout)
        self.tp = tp
        self.pp = pp
        self.ranks = dist.get_world_size() // (tp * pp)
        # (stage, rank, tp_rank) of each global rank
        self.positions = [*itertools.product(range(pp), range(self.ranks), range(tp))]
        self.stage, self.rank, self.tp_rank = self.positions[dist.get_rank()]
        if torch.cuda.is_initialized():  # NCCL allocates its memory now, as in by_position
            dist.all_reduce(torch.zeros(1, device="cuda"))

    def get(self, name: str, key: Callable) -> Group:
        """Return the group of the ranks with this rank's stage, tp_rank and key(rank); None if this
        rank is alone in it. A collective of all ranks."""
        return self.by_position(name, lambda stage, r, tp_rank: (stage, tp_rank, key(r)))

    def by_position(self, name: str, key: Callable) -> Group:
        """Return the group of the ranks with this rank's key(stage, rank, tp_rank); None if this
        rank is alone in it. A collective of all ranks."""
        members = {}  # key -> global ranks
        for global_rank, (stage, rank, tp_rank) in enumerate(self.positions):
            members.setdefault(key(stage, rank, tp_rank), []).append(global_rank)
        groups = [ranks for ranks in members.values() if len(ranks) > 1]

        known_as = name, str(groups)
        if groups and known_as not in self.made:
            self.made[known_as], _ = dist.new_subgroups_by_enumeration(groups, self.timeout)
        group = self.made.get(known_as)
        if group and torch.cuda.is_initialized():
            # NCCL allocates its memory at a group's first collectives. They run now, because in the
            # middle of a step there may be no memory left.
            one = torch.zeros(1, device="cuda")
            all_gather(one.new_empty(group.size()), one, group=group)
            dist.all_reduce(one, group=group)
        return group


# ---------------------------------------------------------------------------- agree


class ConfigError(ValueError):
    """Bad input, found before any work begins. All ranks raise the same one."""


def print0(*text) -> None:
    """Print on rank 0 only. Before the ranks have started, print in any process."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            print(*text, flush=True)
        except BrokenPipeError:  # Ctrl-C has ended the `tee` that reads the output
            # the run goes on without output, because it still has to save
            sys.stdout = open(os.devnull, "w")


def gather_objects(value, group: Group = None) -> list:
    """Return the values of all ranks, in the order of ranks. A collective of all ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group)
    return values


def first_error(error: str, group: Group = None) -> str:
    """Return the first error of any rank, with the ranks that have one; "" if no rank has one. A
    collective of all ranks. error: this rank's, or ""."""
    return merge_errors(gather_objects(error, group))


def merge_errors(errors: list[str]) -> str:
    """Return the first error of a list, in which each rank has an error or "". It ends with the
    ranks that have an error, unless all have one. Returns "" if none has one."""
    failed = [rank for rank, error in enumerate(errors) if error]
    if not failed:
        return ""
    first = errors[failed[0]]
    if len(failed) == len(errors):
        return first
    return f"{first} (on ranks {failed})"


class UnexpectedError(RuntimeError):
    """An exception that no check expects, most likely a bug. All ranks raise the same one, with the
    traceback of the first rank that met it."""


def all_or_none(check, *args, group: Group = None):
    """Return check(*args) of this rank, if it fails on no rank. Otherwise all ranks raise the same
    error, so that no rank waits for another:

        check raises on some rank           all ranks raise
        ValueError, OSError, MemoryError    ConfigError: a user can mend it
        torch.OutOfMemoryError              torch.OutOfMemoryError
        any other Exception                 UnexpectedError, with the traceback

    If ranks fail in different ways, UnexpectedError comes before out of memory, and out of memory
    before ConfigError.

    A collective of all ranks, which waits for the slowest one up to the timeout of `group`. So
    check itself must not contain a collective.
    """
    result = None
    kind = text = ""
    try:
        result = check(*args)
    except (ValueError, OSError, MemoryError) as e:
        kind, text = "config", str(e) or "out of memory"  # a MemoryError may have no text
    except torch.OutOfMemoryError as e:
        kind, text = "memory", str(e)
    except Exception:
        kind, text = "bug", f"rank {dist.get_rank()}: {traceback.format_exc()}"

    failures = gather_objects((kind, text), group)
    for kind, error in (
        ("bug", UnexpectedError),
        ("memory", torch.OutOfMemoryError),
        ("config", ConfigError),
    ):
        texts = [text if failure == kind else "" for failure, text in failures]
        if any(texts):
            raise error(merge_errors(texts))
    return result


def on_rank_0(work, *args, group: Group = None):
    """Run work(*args) on rank 0 only, and return its result on all ranks. Raises as all_or_none
    does. A collective of all ranks."""

    def work_on_rank_0():
        if dist.get_rank() == 0:
            return work(*args)
        return None

    result = all_or_none(work_on_rank_0, group=group)
    return gather_objects(result, group)[0]


def patient_group() -> dist.ProcessGroup:
    """Return a group of all ranks for work that may take one rank longer than --timeout. The
    heartbeat still finds a rank that is dead. A collective of all ranks."""
    return dist.new_group(timeout=timedelta(days=30), backend="gloo")


def check_same(facts: dict[str, object]) -> None:
    """Raise ConfigError on all ranks if a fact differs between ranks. facts: name -> value. A
    collective of all ranks."""
    of_rank_0, *of_others = gather_objects(facts)
    for rank, theirs in enumerate(of_others, 1):
        for name, value in theirs.items():
            if value != of_rank_0[name]:
                raise ConfigError(
                    f"ranks were started differently: {name} is {of_rank_0[name]} on rank 0, "
                    f"{value} on rank {rank}"
                )


# ---------------------------------------------------------------------------- a rank that dies


@contextlib.contextmanager
def heartbeat(rank: int, world: int, advice: str):
    """End this process if a rank is dead or unreachable, because a collective with it would hang.

        who writes     a thread of each rank, every BEAT_S seconds: the rank's name and the time,
                       into the store on rank 0's node
        who reads      the same thread reads the beats of all ranks
        who is ended   the reader ends its own process, if a beat has not changed for SILENT_BEATS
                       beats, or if the store has not answered for as long. It prints which rank is
                       silent, and `advice`. All remaining ranks end in this way
        who may stop   a rank whose `with` block ends writes "" as its last beat: nobody misses it

    The thread beats whatever the main thread waits for. A timer guards the store, because on a lost
    node a call of the store hangs or raises. A collective of all ranks.
    """
    if world == 1:
        yield
        return

    # another client of the same store: a client has a lock, which a waiting main thread may hold
    store = dist.distributed_c10d._get_default_store().clone()
    keys = [f"beat-{r}" for r in range(world)]
    name = f"rank {rank} on host {os.uname().nodename} (process {os.getpid()})"
    finished = threading.Event()  # the `with` block has ended
    silence_s = SILENT_BEATS * BEAT_S
    no_store = (
        f"the store on rank 0's node, {os.environ['MASTER_ADDR']}, has not answered "
        f"for {silence_s:.0f} s: rank 0 or its node"
    )

    def end(cause):
        if finished.is_set():
            return
        print(
            f"rank {rank}: {cause} is dead or unreachable; this run ends. {advice}",
            file=sys.stderr,
            flush=True,
        )
        # the store may be a part of this process, and the remaining ranks need it to find the same
        time.sleep(2 * BEAT_S)
        os._exit(1)

    def beat():
        history = deque(maxlen=SILENT_BEATS + 1)  # the last beats of all ranks, as they were read
        while not finished.wait(BEAT_S):
            timer = threading.Timer(silence_s, end, [no_store])
            timer.daemon = True
            timer.start()
            try:
                store.set(keys[rank], f"{name}: {time.monotonic()}")
                history.append(store.multi_get(keys))
            except RuntimeError:  # the store is gone: the timer ends this process
                return
            timer.cancel()

            if len(history) <= SILENT_BEATS:
                continue
            for oldest, newest in zip(history[0], history[-1]):
                stopped = newest == b""  # it has ended well
                if oldest == newest and not stopped:
                    silent_rank = newest.decode().partition(":")[0]
                    end(f"{silent_rank} gave no sign for {silence_s:.0f} s: it")
        with contextlib.suppress(RuntimeError):  # the store may have ended with rank 0
            store.set(keys[rank], "")

    all_or_none(store.set, keys[rank], name)  # so that each key exists when it is first read
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    error_of_all = None
    try:
        yield
    except (ConfigError, UnexpectedError) as error:  # all ranks raise it, and none is dead
        error_of_all = error
    except BaseException:
        # exiting waits for communicators, and they may wait for a rank: kill this process in 10 s
        signal.alarm(10)
        raise
    finished.set()
    thread.join(2 * BEAT_S)  # for the last beat
    if error_of_all:
        raise error_of_all
