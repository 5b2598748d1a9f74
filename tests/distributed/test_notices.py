"""What processes leave for each other, and a name for the attempt that they have in common."""

import threading

import pytest
from torch.distributed import HashStore

from utils.distributed.heartbeat import PeerLostError
from utils.distributed.kv_store import Notices, common_attempt


def attempts(store, count: int) -> list[str]:
    """What all processes of an attempt call it; each is a thread here."""
    names: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda rank=rank: names.update({rank: common_attempt(store, rank, count, 60.0)}))
        for rank in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [names[rank] for rank in range(count)]


def test_all_processes_of_an_attempt_have_one_name_for_it_and_the_next_attempt_another():
    """In one store, with everything that the attempts before have left there."""
    store = HashStore()
    names = [attempts(store, count) for count in (3, 3, 2, 4)]
    assert all(len(set(each)) == 1 for each in names)
    assert len({each[0] for each in names}) == 4


@pytest.mark.parametrize("rank", [0, 1])
def test_who_does_not_come_is_named(rank):
    with pytest.raises(PeerLostError, match="the first process" if rank else "rank 1 did"):
        common_attempt(HashStore(), rank, 2, seconds=0.0)


def test_a_notice_is_read_by_all_until_another_takes_its_place():
    notices = Notices(HashStore())
    assert notices.read("stop") is None
    notices.post("stop", "SIGTERM")
    assert notices.read("stop") == "SIGTERM"
    notices.post("stop", "")
    assert notices.read("stop") == ""


def test_a_board_that_is_gone_is_a_connection_error():
    class Gone:
        def set(self, *arguments):
            raise RuntimeError("Broken pipe")

        check = get = set

    for use in (lambda board: board.post("a", "b"), lambda board: board.read("a")):
        with pytest.raises(ConnectionError, match="the first process is gone: Broken pipe"):
            use(Notices(Gone()))
