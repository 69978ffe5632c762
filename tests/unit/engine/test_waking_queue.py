"""The queue with a descriptor: order, and that it is readable exactly while something is there."""

from __future__ import annotations

import select
import threading

from diptych.engine.waking_queue import WakingQueue


def is_readable(queue: WakingQueue[int]) -> bool:
    return bool(select.select([queue.wake_fd], [], [], 0)[0])


def test_first_in_first_out_and_readable_while_something_is_there() -> None:
    queue: WakingQueue[int] = WakingQueue()
    assert queue.take() is None and not is_readable(queue)
    for number in range(3):
        queue.put(number)
    assert is_readable(queue) and queue.take() == 0 and is_readable(queue)
    assert queue.take_all() == [1, 2] and not is_readable(queue) and queue.take() is None
    queue.close()


def test_another_threads_items_all_arrive() -> None:
    queue: WakingQueue[int] = WakingQueue()
    thread = threading.Thread(target=lambda: [queue.put(number) for number in range(1, 1001)])
    thread.start()
    taken: list[int] = []
    while len(taken) < 1000:
        assert select.select([queue.wake_fd], [], [], 10)[0]
        taken += queue.take_all()
    thread.join()
    assert taken == list(range(1, 1001)) and not is_readable(queue)
    queue.close()
