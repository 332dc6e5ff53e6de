"""What is kept back of a disk is kept from everybody, and one at that limit does not change its mind at once."""

import os
from pathlib import Path

import pytest

from swarm_agent.room import MIB, RESERVE_BYTES, RESERVE_FILES, ROOMY_BYTES, NoRoom, check_room, shortage

HERE = (Path("/data"),)


def disk(free_bytes: int, files: int = 10**6, free_files: int = 10**6) -> os.statvfs_result:
    return os.statvfs_result((4_096, 1, 10**12, 10**12, free_bytes, files, free_files, free_files, 0, 255))


@pytest.fixture
def disks(monkeypatch: pytest.MonkeyPatch) -> dict[Path, os.statvfs_result]:
    found: dict[Path, os.statvfs_result] = {}
    monkeypatch.setattr(os, "statvfs", found.__getitem__)
    return found


def test_what_fits_beside_the_reserve_fits_and_a_byte_more_is_told_with_what_is_kept_back(
    disks: dict[Path, os.statvfs_result],
) -> None:
    disks[HERE[0]] = disk(RESERVE_BYTES + 3)
    check_room(HERE[0], 3)
    with pytest.raises(NoRoom, match=r"4 bytes do not fit: 64\.0 MiB are free at /data, and 64 MiB are kept"):
        check_room(HERE[0], 4)


def test_a_disk_below_its_reserve_takes_no_new_jobs_until_it_has_some_room_to_spare(
    disks: dict[Path, os.statvfs_result],
) -> None:
    told = []
    was_short = False
    for free_bytes in (RESERVE_BYTES, RESERVE_BYTES - 1, RESERVE_BYTES, ROOMY_BYTES - 1, ROOMY_BYTES):
        disks[HERE[0]] = disk(free_bytes)
        told.append(shortage(HERE, was_short=was_short))
        was_short = bool(told[-1])
    assert [bool(each) for each in told] == [False, True, True, True, False]
    assert told[1] == "disk nearly full: 64.0 MiB free at /data, and 64 MiB are kept back"


def test_a_disk_may_be_full_of_files_and_one_that_does_not_count_them_is_not(
    disks: dict[Path, os.statvfs_result],
) -> None:
    disks[HERE[0]] = disk(100 * MIB, free_files=RESERVE_FILES - 1)
    assert "room for 1023 more files" in shortage(HERE, was_short=False)
    disks[HERE[0]] = disk(100 * MIB, files=0, free_files=0)
    assert shortage(HERE, was_short=False) == ""


def test_every_disk_of_a_node_counts(disks: dict[Path, os.statvfs_result]) -> None:
    disks[Path("/data")], disks[Path("/checkpoints")] = disk(100 * MIB), disk(MIB)
    assert "at /checkpoints" in shortage([*disks], was_short=False)
