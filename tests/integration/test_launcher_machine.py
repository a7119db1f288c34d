"""What the launcher reads of a machine: texts of tools and the kernel, and this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.integration.launcher import machine, machine_file
from kvtier.integration.launcher.load_watch import LoadWatch

CSV = """\
NVIDIA RTX 6000D, 85651 MiB, 00000000:41:00.0, 4, 16
NVIDIA RTX PRO 6000 Blackwell Workstation Edition, 97887 MiB, 00000000:01:00.0, 5, 16
NVIDIA GB10, [N/A], 00000000:51:00.0, [N/A], [N/A]
"""

RIG = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tPHB\tPHB\tPHB\tPHB\t0-63\t0\t\tN/A\n"
    "GPU1\tPHB\t X \tPIX\tPIX\tPHB\t0-63\t0\t\tN/A\n"
    "GPU2\tPHB\tPIX\t X \tPIX\tPHB\t0-63\t0\t\tN/A\n"
    "GPU3\tPHB\tPIX\tPIX\t X \tPHB\t0-63\t0\t\tN/A\n"
    "NIC0\tPHB\tPHB\tPHB\tPHB\t X \n\nLegend:\n\n  X    = Self\n"
    "  SYS  = Connection traversing PCIe as well as the SMP interconnect\n"
    "\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)
TWO_SOCKETS = (
    "\tGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity\n"
    "GPU0\t X \tPHB\tSYS\t0-31\t0\nGPU1\tPHB\t X \tSYS\t0-31\t0\nGPU2\tSYS\tSYS\t X \t32-63\t1\n"
)
NVLINK = (
    "\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\n"
    "GPU0\t X \tNV18\tSYS\t0-47\t0\nGPU1\tNV18\t X \tSYS\t0-47\t0\nNIC0\tSYS\tSYS\t X \n"
)
SINGLE = "\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-15\t0\n"

LSPCI = """\
01:00.0 VGA compatible controller: NVIDIA Corporation Device 2bb1 (rev a1)
	Capabilities: [134 v1] Physical Resizable BAR
		BAR 1: current size: 128GB, supported: 64MB 128MB 256MB 512MB 1GB 2GB 128GB

01:00.1 Audio device: NVIDIA Corporation Device 22e8 (rev a1)

41:00.0 3D controller: NVIDIA Corporation Device 2bb9 (rev a1)
	Capabilities: [134 v1] Physical Resizable BAR
		BAR 1: current size: 256MB, supported: 256MB 512MB 128GB

81:00.0 3D controller: NVIDIA Corporation Device 2bb9 (rev a1)
"""


def test_cards_come_in_the_order_of_their_address() -> None:
    assert machine.parse_cards(CSV) == [
        machine.Card(
            "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 95.6, "0000:01:00.0", None, 63.04e9
        ),
        machine.Card("NVIDIA RTX 6000D", 83.6, "0000:41:00.0", None, 31.52e9),
    ]
    assert machine.parse_cards("NVIDIA-SMI has failed\n") == []


@pytest.mark.parametrize(
    ("text", "pairs", "farthest", "level"),
    [
        (RIG, 6, "PHB", "PHB"),
        (TWO_SOCKETS, 3, "SYS", None),
        (NVLINK, 1, "NV", None),
        (SINGLE, 0, "", None),
        ("", 0, "", None),
    ],
)
def test_p2p_follows_from_the_topology(
    text: str, pairs: int, farthest: str, level: str | None
) -> None:
    found = machine.parse_topology(text)
    assert len(found) == pairs
    assert machine.farthest(found) == farthest
    assert machine.p2p_level(machine.farthest(found)) == level


def test_a_switch_alone_needs_no_level() -> None:
    assert machine.p2p_level("PIX") is machine.p2p_level("PXB") is None


def test_cards_on_the_bus_and_their_bars() -> None:
    assert machine.parse_devices(LSPCI) == {
        "01:00.0": (131072, 131072),
        "41:00.0": (256, 131072),
        "81:00.0": (0, 0),
    }


def test_the_mount_that_holds_a_store() -> None:
    text = (
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "30 22 9:0 / /mnt/nvme rw,noatime shared:2 - xfs /dev/md0 rw,noquota\n"
        "31 22 0:40 / /mnt/with\\040space rw - tmpfs tmpfs rw\n"
    )
    assert machine.parse_mount(text, Path("/mnt/nvme/kvtier")) == ("xfs", "rw,noatime", "9:0")
    assert machine.parse_mount(text, Path("/mnt/nvmes")) == ("ext4", "rw,relatime", "8:1")
    assert machine.parse_mount(text, Path("/mnt/with space/a"))[0] == "tmpfs"


def _rig(top: Path) -> machine.Machine:
    """The reference rig, as its tools and its kernel describe it."""
    files = {
        "proc/cmdline": "root=/dev/sda1 amd_iommu=off iommu=pt pcie_aspm=off pci=realloc quiet\n",
        "proc/meminfo": "MemTotal:       527991808 kB\nMemFree: 1 kB\n",
        "proc/self/mountinfo": "22 1 9:0 / / rw,noatime - xfs /dev/md0 rw\n",
        "sys/module/pcie_aspm/parameters/policy": "default [performance] powersave\n",
        "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always [advise] never\n",
        "sys/bus/pci/devices/0000:01:00.0/numa_node": "0\n",
        "sys/bus/pci/devices/0000:41:00.0/numa_node": "-1\n",
        "sys/dev/block/9:0/queue/write_cache": "write back\n",
        "sys/dev/block/9:0/md/level": "raid0\n",
    }
    for name, text in files.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text)

    def run(*command: str) -> str:
        if command[0] == "lspci":
            return LSPCI
        return RIG if "topo" in command else CSV

    return machine.read(Path("/mnt/nvme"), top=top, run=run)


def test_facts_of_the_reference_rig(tmp_path: Path) -> None:
    rig = _rig(tmp_path)
    assert [card.numa for card in rig.cards] == [0, -1]
    assert (rig.link, rig.cards_on_bus, rig.bar_too_small) == ("PHB", 3, ("41:00.0",))
    assert rig.kernel == ("amd_iommu=off", "iommu=pt", "pcie_aspm=off", "pci=realloc")
    assert (rig.aspm, rig.memory) == ("performance", 527991808 * 1024)
    assert rig.shared_huge_pages == "advise"
    assert rig.drive == machine.Drive("xfs", "rw,noatime", "9:0", "raid0", "write back")


def test_this_machine_can_be_read(tmp_path: Path) -> None:
    here = machine.read(tmp_path)
    assert here.memory > 2**28
    assert here.drive is not None and here.drive.file_system


def test_differences_from_the_saved_machine_are_told(tmp_path: Path) -> None:
    rig = _rig(tmp_path)
    file = tmp_path / "etc" / "machine.toml"
    assert machine_file.differences(machine_file.load(file), rig) == []
    machine_file.save(machine_file.load(file), rig)
    saved = machine_file.load(file)
    assert saved.facts == machine_file.facts(rig)
    assert machine_file.differences(saved, rig) == []
    file.write_text(
        file.read_text().replace("[environment]", '[environment]\nNCCL_P2P_LEVEL = "SYS"')
    )
    saved = machine_file.load(file)
    (tmp_path / "proc/cmdline").write_text("root=/dev/sda1\n")
    [line] = machine_file.differences(saved, _changed(tmp_path))
    assert line.startswith('kernel was ["amd_iommu=off", ') and line.endswith("and is []")
    machine_file.save(saved, _changed(tmp_path))
    again = machine_file.load(file)
    assert again.environment == {"NCCL_P2P_LEVEL": "SYS"} and again.facts["kernel"] == []


def _changed(top: Path) -> machine.Machine:
    return machine.read(
        top=top, run=lambda *c: LSPCI if c[0] == "lspci" else RIG if "topo" in c else CSV
    )


def test_a_broken_machine_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "machine.toml"
    for text in ("facts = [", "facts = 1"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="mend or remove it"):
            machine_file.load(file)


def test_links_are_judged_by_what_they_did_under_load(tmp_path: Path) -> None:
    errors = tmp_path / "sys/bus/pci/devices/0000:41:00.0/aer_dev_correctable"
    errors.parent.mkdir(parents=True)
    errors.write_text("RxErr 3\nTOTAL_ERR_COR 3\n")
    idle = "0000:01:00.0, 1, 16, 5, 16\n0000:41:00.0, 1, 8, 5, 16\n0000:81:00.0, [N/A], 8, 5, 16\n"
    busy = "0000:01:00.0, 5, 16, 5, 16\n0000:41:00.0, 5, 8, 5, 16\n"
    answers = [idle, busy, idle]
    watch = LoadWatch(run=lambda *command: answers.pop(0), top=tmp_path)
    for _ in range(3):
        watch._next = 0.0
        watch.look()
    watch.look()  # too soon: nothing is asked
    assert watch.findings() == [
        "0000:41:00.0 ran at PCIe 5.0 x8 while loading, and could at 5.0 x16: look at the slot or "
        "riser (x8 cost a rig 15 %)."
    ]
    errors.write_text("RxErr 30\nTOTAL_ERR_COR 30\n")
    assert "27 PCIe errors (AER)" in watch.findings()[-1]
