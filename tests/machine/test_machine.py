"""Every kind of machine as a tree of sysfs, procfs and cgroup files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from treadle import machine
from treadle.core import TreadleError

GiB = 2**30
AVX2_FLAGS = "fpu cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3 avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def write_cpus(root: Path, siblings: list[str], l3: list[str]) -> None:
    """CPU i has these thread siblings and shares its L3 with these CPUs."""
    write(root, {"sys/devices/system/cpu/online": f"0-{len(siblings) - 1}"})
    for cpu, (mates, cache) in enumerate(zip(siblings, l3, strict=True)):
        folder = f"sys/devices/system/cpu/cpu{cpu}"
        write(
            root,
            {
                f"{folder}/topology/thread_siblings_list": mates,
                f"{folder}/cache/index0/level": "1",
                f"{folder}/cache/index0/shared_cpu_list": mates,
                f"{folder}/cache/index3/level": "3",
                f"{folder}/cache/index3/shared_cpu_list": cache,
            },
        )


def write_node(root: Path, number: int, cpus: str, mem_kb: int, distance: str) -> None:
    folder = f"sys/devices/system/node/node{number}"
    meminfo = f"Node {number} MemTotal:       {mem_kb} kB\nNode {number} MemFree: 1 kB"
    write(root, {f"{folder}/cpulist": cpus, f"{folder}/meminfo": meminfo, f"{folder}/distance": distance})


def threads(root: Path, cpus: int) -> list[int]:
    return machine.read_topology(root, range(cpus)).threads()


def test_neighbouring_smt_siblings_count_once(tmp_path: Path) -> None:
    write_cpus(tmp_path, ["0-1", "0-1", "2-3", "2-3"], ["0-3"] * 4)
    assert threads(tmp_path, 4) == [0, 2]


def test_smt_siblings_half_the_machine_apart_count_once(tmp_path: Path) -> None:
    write_cpus(tmp_path, ["0,4", "1,5", "2,6", "3,7"] * 2, ["0-7"] * 8)
    assert threads(tmp_path, 8) == [0, 1, 2, 3]


def test_smt_off(tmp_path: Path) -> None:
    write_cpus(tmp_path, ["0", "1", "2"], ["0-2"] * 3)
    assert threads(tmp_path, 3) == [0, 1, 2]


def test_virtual_machine_without_topology(tmp_path: Path) -> None:
    topology = machine.read_topology(tmp_path, [0, 1, 5])
    assert topology.threads() == [0, 1, 5]
    assert {(core.node, core.l3) for core in topology.cores} == {(0, 0)}


def test_only_the_second_sibling_is_allowed(tmp_path: Path) -> None:
    write_cpus(tmp_path, ["0,2", "1,3", "0,2", "1,3"], ["0-3"] * 4)
    assert machine.read_topology(tmp_path, [1, 2]).threads() == [1, 2]


def test_offline_cpus_are_left_out(tmp_path: Path) -> None:
    write_cpus(tmp_path, ["0", "1", "2"], ["0-2"] * 3)
    write(tmp_path, {"sys/devices/system/cpu/online": "0,2"})
    assert threads(tmp_path, 3) == [0, 2]


def test_sub_numa_clusters_of_one_socket_are_nodes_of_their_own(tmp_path: Path) -> None:
    """SNC numbers CPUs alternately; all share one L3. The order keeps each node's cores together."""
    write_cpus(tmp_path, [str(cpu) for cpu in range(8)], ["0-7"] * 8)
    write_node(tmp_path, 0, "0,2,4,6", 1000, "10 12")
    write_node(tmp_path, 1, "1,3,5,7", 1000, "12 10")
    topology = machine.read_topology(tmp_path, range(8))
    assert topology.threads() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert [core.node for core in topology.cores] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_chiplets_keep_the_cores_of_one_l3_together(tmp_path: Path) -> None:
    write_cpus(tmp_path, [str(cpu) for cpu in range(4)], ["0,2", "1,3", "0,2", "1,3"])
    topology = machine.read_topology(tmp_path, range(4))
    assert [(core.l3, core.cpus) for core in topology.cores] == [(0, (0,)), (0, (2,)), (1, (1,)), (1, (3,))]


def test_cores_of_a_node_without_memory_belong_to_the_nearest_node_with_some(tmp_path: Path) -> None:
    write_cpus(tmp_path, ["0", "1", "2"], ["0", "1", "2"])
    write_node(tmp_path, 0, "0", 1000, "10 32 32")
    write_node(tmp_path, 1, "1", 0, "32 10 16")
    write_node(tmp_path, 2, "2", 1000, "32 16 10")
    assert [core.node for core in machine.read_topology(tmp_path, range(3)).cores] == [0, 2, 2]


@pytest.mark.parametrize(
    ("quota", "count"),
    [
        ("max 100000", 8),
        ("250000 100000", 2),
        ("400000 100000", 4),
        ("50000 100000", 1),
        ("1600000 100000", 8),
    ],
)
def test_cpu_quota_of_cgroup_2(tmp_path: Path, quota: str, count: int) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": quota})
    assert len(threads(tmp_path, 8)) == count


def test_the_tightest_group_on_the_way_up_counts(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/system.slice/treadle.service",
            "sys/fs/cgroup/system.slice/cpu.max": "300000 100000",
            "sys/fs/cgroup/system.slice/treadle.service/cpu.max": "max 100000",
        },
    )
    assert len(threads(tmp_path, 8)) == 3


@pytest.mark.parametrize("mount", ["cpu,cpuacct", "cpu"])
@pytest.mark.parametrize(("quota", "count"), [("-1", 8), ("200000", 2)])
def test_cpu_quota_of_cgroup_1(tmp_path: Path, mount: str, quota: str, count: int) -> None:
    """Inside a container the path of the host is not there; the limits are at the top of the mount."""
    write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/ab\n3:cpu,cpuacct:/docker/ab",
            f"sys/fs/cgroup/{mount}/cpu.cfs_quota_us": quota,
            f"sys/fs/cgroup/{mount}/cpu.cfs_period_us": "100000",
        },
    )
    assert len(threads(tmp_path, 8)) == count


def meminfo(gib: int) -> dict[str, str]:
    return {"proc/meminfo": f"MemTotal: {2 * gib * 2**20} kB\nMemAvailable:  {gib * 2**20} kB"}


def test_memory_of_nodes_that_are_not_allowed_does_not_count(tmp_path: Path) -> None:
    def node(number: int, free: int, cache: int) -> dict[str, str]:
        label = f"Node {number} "
        text = f"{label}MemTotal: {8 * 2**20} kB\n{label}MemFree: {free * 2**20} kB\n"
        text += f"{label}Active(file): {2**20} kB\n{label}Inactive(file): {cache * 2**20} kB"
        return {f"sys/devices/system/node/node{number}/meminfo": text}

    write(tmp_path, meminfo(9) | node(0, 2, 1) | node(1, 4, 2))
    for allowed, free in (("0", 3), ("1", 6), ("0-1", 9)):
        write(tmp_path, {"proc/self/status": f"Name:\tx\nMems_allowed_list:\t{allowed}\n"})
        assert machine.available_memory(tmp_path) == free * GiB


def test_memory_without_groups(tmp_path: Path) -> None:
    write(tmp_path, meminfo(6))
    assert machine.available_memory(tmp_path) == 6 * GiB


def test_memory_of_cgroup_2_counts_file_cache_as_free(tmp_path: Path) -> None:
    group = {
        "proc/self/cgroup": "0::/box",
        "sys/fs/cgroup/box/memory.max": str(4 * GiB),
        "sys/fs/cgroup/box/memory.current": str(3 * GiB),
        "sys/fs/cgroup/box/memory.stat": f"anon 1\ninactive_file {2 * GiB}",
    }
    write(tmp_path, meminfo(6) | group)
    assert machine.available_memory(tmp_path) == 3 * GiB
    write(tmp_path, {"sys/fs/cgroup/box/memory.max": "max"})
    assert machine.available_memory(tmp_path) == 6 * GiB
    write(
        tmp_path,
        {"sys/fs/cgroup/box/memory.max": str(2 * GiB), "sys/fs/cgroup/box/memory.stat": "inactive_file 0"},
    )
    assert machine.available_memory(tmp_path) == 0


def test_memory_of_cgroup_1(tmp_path: Path) -> None:
    group = {
        "proc/self/cgroup": "4:memory:/box",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(4 * GiB),
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": str(GiB),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(5 * GiB),
    }
    write(tmp_path, meminfo(6) | group)
    assert machine.available_memory(tmp_path) == 3 * GiB


def test_cpu_with_avx2_is_enough(tmp_path: Path) -> None:
    write(tmp_path, {"proc/cpuinfo": f"processor\t: 0\nmodel name\t: Core i5-4200\nflags\t\t: {AVX2_FLAGS}"})
    machine.require_isa(tmp_path)


def test_older_cpu_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    flags = AVX2_FLAGS.replace("avx2 ", "").replace("fma ", "")
    write(tmp_path, {"proc/cpuinfo": f"processor\t: 0\nmodel name\t: Xeon E5-2670\nflags\t\t: {flags}"})
    with pytest.raises(TreadleError, match=r"Xeon E5-2670 lacks avx2, fma\. "):
        machine.require_isa(tmp_path)


def test_other_architecture(tmp_path: Path) -> None:
    write(tmp_path, {"proc/cpuinfo": "processor\t: 0\nFeatures\t: fp asimd"})
    with pytest.raises(TreadleError, match="x86-64"):
        machine.require_isa(tmp_path)


def test_this_machine() -> None:
    machine.require_isa()
    cpus = machine.threads()
    assert cpus
    assert len(set(cpus)) == len(cpus)
    assert set(cpus) <= os.sched_getaffinity(0)
    assert machine.available_memory() > 0
