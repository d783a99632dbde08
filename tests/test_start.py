"""Show what a run finds out at its start: memory, paths, unreadable files, and other launchers."""

from pytest import raises

import streams
from test_all import parametrize

GIB = 2**30
NONE_V1 = 9223372036854771712  # "no limit" of version 1

V1_MOUNT = "35 31 0:32 {group} {at} rw,relatime shared:9 - cgroup cgroup rw,memory\n"
V2_MOUNT = "41 31 0:38 {group} {at} rw,relatime - cgroup2 cgroup2 rw\n"
CPU_MOUNT = "33 31 0:30 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"

# Trees of files, and the budget in GiB of a machine of 64 GiB. A tree has the files cgroup and
# mountinfo of /proc/self, and limits by their paths below /sys/fs/cgroup
TREES = {
    "no control groups": ({}, 64),
    "version 2": ({"cgroup": "0::/job\n", "job/memory.max": 8 * GIB}, 8),
    "version 2, no limit": ({"cgroup": "0::/job\n", "job/memory.max": "max"}, 64),
    "version 2, a group above": (
        {
            "cgroup": "0::/slurm/job_7/step_0\n",
            "slurm/job_7/step_0/memory.max": "max",
            "slurm/job_7/memory.max": 6 * GIB,
            "slurm/memory.max": 32 * GIB,
        },
        6,
    ),
    "version 2, memory.high": (
        {"cgroup": "0::/job\n", "job/memory.max": 8 * GIB, "job/memory.high": 5 * GIB},
        5,
    ),
    "version 2, a namespace": (
        {
            "cgroup": "0::/\n",
            "mountinfo": V2_MOUNT.format(group="/", at="/sys/fs/cgroup"),
            "memory.max": 3 * GIB,
        },
        3,
    ),
    "version 1": (
        {
            "cgroup": "9:cpu,cpuacct:/\n4:memory:/slurm/job_7\n1:name=systemd:/\n",
            "mountinfo": CPU_MOUNT + V1_MOUNT.format(group="/", at="/sys/fs/cgroup/memory"),
            "memory/memory.limit_in_bytes": NONE_V1,
            "memory/slurm/job_7/memory.limit_in_bytes": 2 * GIB,
        },
        2,
    ),
    "version 1, without mountinfo": (
        {"cgroup": "4:memory:/job\n", "memory/job/memory.limit_in_bytes": 2 * GIB},
        2,
    ),
    "version 1, a group above": (
        {
            "cgroup": "4:cpu,memory:/slurm/job_7\n",
            "memory/slurm/job_7/memory.limit_in_bytes": NONE_V1,
            "memory/slurm/memory.limit_in_bytes": 7 * GIB,
        },
        7,
    ),
    "version 1, no limit": (
        {"cgroup": "4:memory:/job\n", "memory/job/memory.limit_in_bytes": NONE_V1},
        64,
    ),
    "version 1, a container": (
        {
            "cgroup": "4:memory:/docker/7f\n",
            "mountinfo": V1_MOUNT.format(group="/docker/7f", at="/sys/fs/cgroup/memory"),
            "memory/memory.limit_in_bytes": NONE_V1,
            "memory/memory.stat": f"cache 5\nhierarchical_memory_limit {4 * GIB}\nrss 1\n",
        },
        4,
    ),
    "version 1, a container that sees another group's mount": (
        {
            "cgroup": "4:memory:/docker/7f\n",
            "mountinfo": V1_MOUNT.format(group="/kubepods/pod1", at="/sys/fs/cgroup/memory"),
            "memory/memory.limit_in_bytes": 9 * GIB,
        },
        9,
    ),
    "hybrid": (
        {
            "cgroup": "4:memory:/job\n1:name=systemd:/\n0::/user.slice\n",
            "mountinfo": V1_MOUNT.format(group="/", at="/sys/fs/cgroup/memory")
            + V2_MOUNT.format(group="/", at="/sys/fs/cgroup/unified"),
            "memory/job/memory.limit_in_bytes": 2 * GIB,
            "unified/user.slice/cgroup.procs": 1,
        },
        2,
    ),
    "mounted elsewhere, in a path with a space": (
        {
            "cgroup": "4:memory:/a b:c\n",
            "mountinfo": V1_MOUNT.format(group="/", at=r"/sys/fs/cgroup/mem\040ory"),
            "mem ory/a b:c/memory.limit_in_bytes": 2 * GIB,
        },
        2,
    ),
    "files that nobody understands": (
        {"cgroup": "nothing\n0::/job\n", "mountinfo": "?\n\n1 - cgroup2\n", "job/memory.max": "?"},
        64,
    ),
}


@parametrize("name", TREES)
def test_smallest_limit_of_the_control_groups_counts(name, tmp_path, monkeypatch):
    """Of the machine's memory and all limits of a process's control groups, the smallest counts.

    Catches a plan for more memory than a job may use, which the kernel kills.
    """
    files, gib = TREES[name]
    for path, content in files.items():
        folder = "proc/self" if path in ("cgroup", "mountinfo") else "sys/fs/cgroup"
        file = tmp_path / folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}")
    monkeypatch.setattr(streams, "HOST_BYTES", 64 * GIB)
    assert streams.host_budget(2, None, tmp_path) == gib * GIB * 7 / 8 / 2
    assert streams.host_budget(2, gib * GIB, tmp_path) == gib * GIB / 2
    with raises(ValueError, match=rf"--host-memory .* too much: .* allows {gib}\.0 GiB\. "):
        streams.host_budget(2, gib * GIB + 1, tmp_path)
