"""Start the ranks, let them agree, let signals stop them, and name a rank that dies.

A rank is a process. On GPUs, torchrun starts one rank per GPU on every node, and with
--max-restarts it restarts all of them when one dies. This file handles what can go wrong between
ranks. Its functions are collectives, which all ranks must call, if their docstrings say so:

    use_more_queues()         give each CUDA stream its own queue, so that none holds up another
    start_ranks(timeout)      join the other ranks, also after a restart; refuse other launchers
    set_timeout(timeout)      change the timeout of start_ranks
    Groups(timeout, tp, pp)   make process groups: ranks with the same key communicate
    print0(text)              print on rank 0 only
    all_or_none(check, x)     run check(x) on all ranks; if it fails on one, all ranks raise
    on_rank_0(work, x)        run work(x) on rank 0 only; all ranks get its result
    gather_objects(value)     all ranks get the values of all ranks
    first_error(text)         all ranks get the error of the first rank that has one
    check_same(facts)         all ranks raise if a fact, such as a flag, differs between ranks
    patient_group()           a group whose collectives may take longer than --timeout
    with stop_signals():      signals ask the run to stop, so that it can save
    with heartbeat(...):      if a rank is dead or unreachable, the remaining ranks name it and end

If a check fails on one rank only, the remaining ranks go on to a collective that this rank never
joins. So every check that may fail on some ranks only goes through all_or_none:

    device = all_or_none(choose_device, cfg, local_rank)    # rank 5 has no GPU: all ranks raise

Left out: another number of ranks after a restart; torchrun's own time-outs; restarts of several
nodes whose torchruns share one store, because these torchruns may count restarts differently. The
script for several nodes in docs/runs.md avoids such a store: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
"""

import contextlib
import errno
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
from pathlib import Path

import torch
import torch.distributed as dist

BEAT_S = 2.0  # seconds between two beats of a rank (see heartbeat)
# A rank counts as dead if its beat has stayed the same for 60 beats (2 minutes) of the rank that
# checks it. Why so many: while a GPU has a thousand kernels to run, launching the next one waits.
# PyTorch launches some compiled kernels without releasing Python's lock, and then no thread of that
# process runs. One attention kernel may take many seconds, and so may the first message of a
# pipeline. A rank counts only its own beats and compares no times, so the clocks of hosts may
# differ
SILENT_BEATS = 60

# ---------------------------------------------------------------------------- start

# Other launchers -> the environment variables that say how many processes a launcher has started.
# The first variable that is set counts. (srun sets two: the first one counts the tasks of this
# srun, and the second one the tasks of the whole job.)
LAUNCHERS = {
    "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    "mpirun": ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE"),
    "jsrun": ("JSM_NAMESPACE_SIZE",),
    "flux": ("FLUX_JOB_SIZE",),
}


def check_launcher() -> None:
    """Raise ConfigError if a launcher other than torchrun has started several processes. They would
    not know of each other, and each would train alone. Every process raises the same error."""
    if "RANK" in os.environ:
        return
    for launcher, names in LAUNCHERS.items():
        name = next((name for name in names if name in os.environ), None)
        count = os.environ.get(name or "", "")
        if count.isdecimal() and int(count) > 1:
            raise ConfigError(
                f"{launcher} runs {count} tasks ({name}={count}), but no torchrun tells "
                "them their RANK, so each would train alone. Start one torchrun per node, which "
                "starts a rank per GPU, as the Slurm script in docs/runs.md does: #SBATCH --nodes "
                "4 --ntasks-per-node 1, and srun torchrun --nnodes 4 --nproc_per_node 8 "
                "--rdzv-backend c10d --rdzv-id $SLURM_JOB_ID --rdzv-endpoint $(scontrol show "
                "hostnames | head -n 1):29400 train.py. To train with one process on purpose, "
                f"unset {name}"
            )


def use_more_queues() -> None:
    """Give each of up to 32 CUDA streams a hardware queue of its own, unless the environment sets
    another number of queues. Call this before CUDA starts.

    By default there are 8 queues, so streams share them. Then a message that waits for another rank
    could hold up the very message that the other rank waits for.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def start_ranks(timeout: float) -> tuple[int, int, int]:
    """Join torchrun's ranks, or start as the only rank. Returns (rank, world size, local rank).

    timeout: of collectives, in seconds. This also sets the number of CPU threads. Several ranks
    have one thread each. A single rank has OMP_NUM_THREADS threads, or else one per core. Raises
    ConfigError if another launcher has started several processes.
    """
    check_launcher()
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    limit = timedelta(seconds=timeout)
    if "RANK" in os.environ:
        store, rank, world = next(dist.rendezvous("env://", timeout=limit))
        # torchrun's store still has the keys that ranks wrote before a restart. With this prefix,
        # each restart has keys of its own
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    else:
        store, rank, world = dist.HashStore(), 0, 1
    dist.init_process_group(backend, timeout=limit, store=store, rank=rank, world_size=world)

    # On a CPU, the rounding of a sum depends on the number of threads, and launchers choose
    # different numbers. So the number is fixed here, and losses are reproducible.
    if world > 1:
        torch.set_num_threads(1)
    elif "OMP_NUM_THREADS" not in os.environ:  # if it is there, PyTorch has read it already
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    return rank, world, dist.get_node_local_rank(0)


def set_timeout(timeout: float) -> None:
    """Set the seconds that a collective of all ranks waits for a rank, instead of start_ranks'
    timeout. Groups that are made later get timeouts of their own. (PyTorch has no public function
    for this.)"""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout))


IMPORTED_AT = time.monotonic()  # stands for the start of the process where that is not known


def process_seconds() -> float:
    """Return the seconds since this process started. Under torchrun, return the seconds since
    torchrun started, because the time of the job goes on when torchrun restarts the ranks."""
    pid = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    try:
        # the name of the program is in parentheses, and may have spaces; see proc(5)
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[19])  # from the start of the machine to the start of the process
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):  # there is no /proc, or it has another form
        return time.monotonic() - IMPORTED_AT


# ---------------------------------------------------------------------------- signals

STOP_SIGNALS = (
    signal.SIGINT,  # Ctrl-C
    signal.SIGTERM,  # kill, and most schedulers
    signal.SIGHUP,  # a closed terminal
    signal.SIGUSR1,  # a scheduler can be told to send one of these two before its time limit
    signal.SIGUSR2,
)
EXIT_SECONDS = 5.0  # time for cleaning up if a signal comes before the training begins

# signal -> its handler from before stop_signals; empty when stop_signals is not active
handlers_before = {}


class StopSignal:
    """The first signal that has asked this process to stop. See stop_signals.

    `handle` runs on the main thread, and `watch` on a thread of its own. Both see each signal.
    """

    def __init__(self):
        self.number = 0  # of the first signal; 0: none has come
        self.lock = threading.Lock()  # so that `training` and `ended` never both become true
        self.training = False  # training has begun, so there may be something to save
        self.ended = False  # a signal came before that, so training must not begin any more
        self.over = False  # the `with` block of stop_signals has ended

    def begin_training(self) -> None:
        """Note that from here on there may be something to save. End the process if a signal has
        come before."""
        with self.lock:
            self.training = not self.ended
        if self.ended:
            sys.exit(0)

    def handle(self, number: int, _) -> None:
        """Note a signal. If training has not begun, end the process. This is the signals' handler:
        Python calls it on the main thread, as soon as that thread runs Python code again."""
        first = not self.number
        self.number = self.number or number
        if first and not self.training:
            sys.exit(0)

    def watch(self, pipe: int) -> None:
        """Print that a signal has come; during training only rank 0 prints it. If training has not
        begun, end the process in EXIT_SECONDS, unless the main thread has ended it by then.

        This has a thread of its own, because the main thread calls no handler while it waits for
        other ranks or for the GPU.

        pipe: the file descriptor from which the signals' numbers are read. 0 ends the thread.
        """
        printed = False
        while number := os.read(pipe, 1)[0]:
            if number not in STOP_SIGNALS or printed:
                continue  # a second signal changes nothing, because the save must not be lost
            printed = True
            name = signal.Signals(number).name
            with self.lock:
                self.ended = not self.training
            if self.training:
                self.number = self.number or number
                print0(
                    f"{name}: the run ends after this step. SIGQUIT (Ctrl-\\) would end it at "
                    "once, without a save"
                )
                continue
            rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
            text = f"stopped by {name} before the first step, so there is nothing to save"
            print_error(f"{rank}{text}")
            timer = threading.Timer(EXIT_SECONDS, self.exit)
            timer.daemon = True
            timer.start()

    def exit(self) -> None:
        """End the process at once, unless stop_signals has ended."""
        if not self.over:
            os._exit(0)


@contextlib.contextmanager
def stop_signals():
    """Let the STOP_SIGNALS ask this process to stop, while the `with` block runs. Yields the
    StopSignal.

        before begin_training()  there is nothing to save, so the process ends at once
        after it                 StopSignal.number is the first signal, or 0. The run looks at it
                                 where all ranks can stop together, and then saves

    A signal that is already ignored stays ignored, such as SIGHUP under nohup. A process that this
    one forks handles signals as if stop_signals was not active.
    """
    stop = StopSignal()
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    thread = threading.Thread(target=stop.watch, args=[read_end], daemon=True)
    thread.start()
    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            handlers_before[number] = signal.signal(number, stop.handle) or signal.SIG_DFL
    # Python's own handler writes a signal's number here at once, whatever the main thread does
    pipe_before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    try:
        yield stop
    finally:
        stop.over = True
        signal.set_wakeup_fd(pipe_before)
        restore_handlers()
        os.write(write_end, b"\0")
        thread.join()  # only then may the pipe be closed
        os.close(write_end)
        os.close(read_end)


def restore_handlers() -> None:
    """Handle signals as before stop_signals."""
    for number, handler in handlers_before.items():
        signal.signal(number, handler)
    handlers_before.clear()


# A forked child inherits the pipe of stop_signals, so a signal to the child would also stop this
# process. So signals are blocked from just before the fork until the child has let go of the pipe.
# signal_mask.before_fork: the signals that this thread had blocked already
signal_mask = threading.local()


def hold_signals() -> None:
    """Block the signals that stop_signals handles, in this thread and in the child that it is about
    to fork. Other threads of this process still take signals."""
    signal_mask.before_fork = signal.pthread_sigmask(signal.SIG_BLOCK, list(handlers_before))


def release_signals() -> None:
    """Undo hold_signals. Signals that have come since then are handled now."""
    signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask.before_fork)


def forget_signals() -> None:
    """In a forked child, let go of the pipe and handle signals as before stop_signals."""
    if handlers_before:
        signal.set_wakeup_fd(-1)
        restore_handlers()
    release_signals()


os.register_at_fork(
    before=hold_signals, after_in_parent=release_signals, after_in_child=forget_signals
)

# ---------------------------------------------------------------------------- groups

# A process group. As an argument of a collective, None means all ranks. From Groups, None means
# that this rank is alone in its group, so there is nothing to communicate
Group = dist.ProcessGroup | None

# torch 2.13 renames the flat collectives and deprecates the old names; 2.11 has only the old names
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Groups:
    """The process groups of this rank, each made once.

    Groups with different names have different communicators, so collectives of one name do not
    wait for collectives of another name.

    Global ranks are numbered stage by stage: a pipeline has pp stages, and `stage` is a rank's
    stage. In a stage, tp neighbours are a tensor-parallel group, and `tp_rank` is a rank's number
    in it. The ranks with the same stage and tp_rank share model states and sequences among them.
    `ranks` says how many these are, and `rank` (0 ... ranks - 1) is a rank's number among them.

        pp = 2, tp = 2     global rank   0  1  2  3     4  5  6  7
                           stage         0  0  0  0     1  1  1  1
                           tp_rank       0  1  0  1     0  1  0  1
                           rank          0  0  1  1     0  0  1  1

    The caller passes a function that gives each rank a key, and the ranks with the same key are a
    group. In this example, where r stands for `rank`:

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

        made_key = name, str(groups)
        if groups and made_key not in self.made:
            self.made[made_key], _ = dist.new_subgroups_by_enumeration(groups, self.timeout)
        group = self.made.get(made_key)
        if group and torch.cuda.is_initialized():
            # NCCL allocates its memory at a group's first collectives. They run now, because in the
            # middle of a step there may be no memory left.
            one = torch.zeros(1, device="cuda")
            all_gather(one.new_empty(group.size()), one, group=group)
            dist.all_reduce(one, group=group)
        return group


# ---------------------------------------------------------------------------- agree


class ConfigError(ValueError):
    """An error that a user can mend, in a flag, a file or a layer. All ranks raise the same one."""


def print0(*text) -> None:
    """Print on rank 0 only. Before the ranks have started, print in any process."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            print(*text, flush=True)
        except OSError as e:
            # The run goes on without this line, because it still has to save. So stdout becomes a
            # new file object, in whose buffer the line is not
            if e.errno in (errno.ENOSPC, errno.EDQUOT):
                # the disk is full, and may have room for later lines
                sys.stdout = open(sys.stdout.fileno(), "w", closefd=False)
            else:
                # the reader is gone: Ctrl-C has ended the `tee`, or the terminal was closed
                sys.stdout = open(os.devnull, "w")


def print_error(text: str) -> None:
    """Print a line to stderr, on any rank. If nobody can read stderr, the process goes on."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def gather_objects(value, group: Group = None) -> list:
    """Return the values of all ranks, in the order of ranks. A collective of all ranks.

    group: None, or a patient_group, which also has all ranks but waits for longer.
    """
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group)
    return values


def first_error(error: str, group: Group = None) -> str:
    """Return the text of the first rank's error, as merge_errors does; "" if no rank has one.
    error: this rank's error, or "". A collective of all ranks."""
    return merge_errors(gather_objects(error, group))


def merge_errors(errors: list[str]) -> str:
    """Return the first error of a list that has an error or "" for each rank; "" if there is none.

    If only some ranks have an error, the text ends with them: "no such file (on ranks [1, 3])".
    """
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
    """Run check(*args) on every rank, and return this rank's result if no rank fails. If a rank
    fails, all ranks raise the same error, so that no rank waits for another:

        check raises on some rank           all ranks raise
        ValueError, OSError, MemoryError    ConfigError: a user can mend it
        torch.OutOfMemoryError              torch.OutOfMemoryError
        any other Exception                 UnexpectedError, with the traceback

    If ranks fail in different ways, all ranks raise the same error: UnexpectedError if one of the
    ranks calls for it, else torch.OutOfMemoryError, else ConfigError.

    check must not contain a collective. A rank that fails before it would never join it, and the
    other ranks would wait there.

    group: None, or a patient_group. A collective of all ranks, which waits for the slowest rank up
    to the group's timeout.
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
    for raised_kind, error_class in (  # the worst kind first
        ("bug", UnexpectedError),
        ("memory", torch.OutOfMemoryError),
        ("config", ConfigError),
    ):
        # per rank: its error if it is of this kind, else ""
        errors = [text if kind == raised_kind else "" for kind, text in failures]
        if any(errors):
            raise error_class(merge_errors(errors))
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
    """Return a group of all ranks with a timeout of 30 days, for work that may take one rank longer
    than --timeout. The heartbeat still finds a rank that is dead. A collective of all ranks."""
    return dist.new_group(timeout=timedelta(days=30), backend="gloo")


def check_same(facts: dict[str, object]) -> None:
    """Raise ConfigError on all ranks if a fact differs between ranks. facts: this rank's values by
    name; all ranks pass the same names. A collective of all ranks."""
    facts_of_rank_0, *facts_of_others = gather_objects(facts)
    for rank, facts_of_rank in enumerate(facts_of_others, 1):
        for name, value in facts_of_rank.items():
            if value != facts_of_rank_0[name]:
                raise ConfigError(
                    f"ranks were started differently: {name} is {facts_of_rank_0[name]} on rank "
                    f"0, {value} on rank {rank}"
                )


# ---------------------------------------------------------------------------- a rank that dies


class HeartbeatThread(threading.Thread):
    """The thread by which this rank shows that it is alive, and finds a rank that is not. See
    heartbeat."""

    def __init__(self, rank: int, world: int, advice: str):
        super().__init__(daemon=True)
        # A client of the store has a lock, which the main thread may hold while it waits. So this
        # thread gets a client of its own
        self.store = dist.distributed_c10d._get_default_store().clone()
        self.keys = [f"beat-{r}" for r in range(world)]
        self.rank = rank
        self.rank_name = f"rank {rank} on host {os.uname().nodename} (process {os.getpid()})"
        self.advice = advice
        self.silence_s = SILENT_BEATS * BEAT_S
        self.finished = threading.Event()  # the `with` block has ended

    def write_beat(self, beat: str) -> None:
        self.store.set(self.keys[self.rank], beat)

    def run(self) -> None:
        """Write this rank's beat and judge the beats of all ranks, until the `with` block ends."""
        history = deque(maxlen=SILENT_BEATS + 1)  # the last beats of all ranks, as they were read
        while not self.finished.wait(BEAT_S):
            timer = threading.Timer(self.silence_s, self.end_without_store)
            timer.daemon = True
            timer.start()
            try:
                self.write_beat(f"{self.rank_name}: {time.monotonic()}")
                history.append(self.store.multi_get(self.keys))
            except RuntimeError:  # the store is gone: the timer ends this process
                return
            timer.cancel()

            for name in silent_ranks(history):
                self.end_process(
                    f"{name} gave no sign for {self.silence_s:.0f} s: it is dead or unreachable"
                )
        with contextlib.suppress(RuntimeError):  # the store may have ended with rank 0
            self.write_beat("")

    def end_without_store(self) -> None:
        """End this process because the store has not answered."""
        self.end_process(
            f"the store on rank 0's node, {os.environ['MASTER_ADDR']}, has not answered for "
            f"{self.silence_s:.0f} s: rank 0 or its node is dead or unreachable"
        )

    def end_process(self, reason: str) -> None:
        """Print the reason and end this process, unless the `with` block has ended."""
        if self.finished.is_set():
            return
        print_error(f"rank {self.rank}: {reason}; this run ends. {self.advice}")
        # the store may run in this process, and the remaining ranks still need to read it to find
        # the silent rank
        time.sleep(2 * BEAT_S)
        os._exit(1)


def silent_ranks(history: deque) -> list[str]:
    """Return the names of the ranks whose beat has not changed for SILENT_BEATS beats.

    history: one entry per beat of this rank, the newest last. An entry lists the beats of all ranks
    as they were read then, as bytes.
    """
    if len(history) <= SILENT_BEATS:
        return []
    names = []
    for oldest, newest in zip(history[0], history[-1]):
        has_ended = newest == b""  # the rank's `with` block
        if oldest == newest and not has_ended:
            names.append(newest.decode().partition(":")[0])
    return names


@contextlib.contextmanager
def heartbeat(rank: int, world: int, advice: str):
    """End this process if a rank is dead or unreachable, because a collective with it would hang.

    A HeartbeatThread on each rank does this every BEAT_S seconds while the `with` block runs:

        write    its beat, which is the rank's name and the time, to the store on rank 0's node
        read     the beats of all ranks
        judge    if a rank's beat has not changed for SILENT_BEATS beats, the rank is silent. Then
                 print its name and `advice`, and end this process. All remaining ranks do the
                 same, each by itself

    A timer ends this process if the store has not answered for the time of SILENT_BEATS beats.
    Then rank 0's node may be lost, and calls of the store hang or raise.

    A rank whose `with` block has ended writes "" as its last beat, and never counts as silent. A
    rank whose main thread waits goes on beating, because the beats come from their own thread.

    advice: the sentence that ends the message, for example "Rows so far are written".
    A collective of all ranks.
    """
    if world == 1:
        yield
        return

    thread = HeartbeatThread(rank, world, advice)
    # the first beat, so that each key exists when it is first read
    all_or_none(thread.write_beat, thread.rank_name)
    thread.start()
    error_of_all = None
    try:
        yield
    except (ConfigError, UnexpectedError) as error:  # all ranks raise it, and none is dead
        error_of_all = error
    except BaseException:
        # This rank may fail alone. At exit a process waits for its communicators, and they may wait
        # for another rank. So SIGALRM kills this process in 10 s, if it has not ended by then
        signal.alarm(10)
        raise
    thread.finished.set()
    thread.join(2 * BEAT_S)  # it writes the last beat
    if error_of_all:
        raise error_of_all
