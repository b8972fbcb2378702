"""The allocator refuses what would lose or alias a page."""

from __future__ import annotations

import pytest

from soloist.cache.pages import PageAllocator, pages_for


def test_all_or_nothing() -> None:
    pool = PageAllocator(4)
    pages = pool.allocate(3)
    assert pages is not None and len(set(pages)) == 3
    assert pool.allocate(2) is None and pool.free == 1
    pool.check([pages])


def test_a_shared_page_is_free_when_its_last_owner_lets_go() -> None:
    pool = PageAllocator(4)
    mine = pool.allocate(2)
    assert mine is not None
    pool.retain(mine)
    pool.check([mine, mine])
    assert [pool.references(page) for page in mine] == [2, 2]
    assert pool.release(mine) == [] and pool.free == 2
    assert pool.release(mine) == mine and pool.free == 4
    pool.check([])


def test_groups_are_aligned_and_return_together() -> None:
    pool = PageAllocator(6, group=2)
    pages = pool.allocate(4)
    assert pages is not None and all(pages[i] % 2 == 0 and pages[i + 1] == pages[i] + 1 for i in (0, 2))
    assert pool.release([pages[0]]) == [] and pool.free == 2
    assert pool.release([pages[1]]) == [pages[0], pages[1]] and pool.free == 4
    with pytest.raises(ValueError, match="whole number"):
        pool.allocate(3)


def test_mistakes_are_refused() -> None:
    pool = PageAllocator(2)
    pages = pool.allocate(1)
    assert pages is not None
    with pytest.raises(ValueError, match="released 2 times"):
        pool.release(pages * 2)
    pool.release(pages)
    with pytest.raises(ValueError, match="released"):
        pool.release(pages)
    with pytest.raises(ValueError, match="free"):
        pool.retain(pages)
    with pytest.raises(ValueError, match="outside"):
        pool.references(7)
    with pytest.raises(AssertionError, match="owners"):
        pool.check([[0]])


@pytest.mark.parametrize(
    ("tokens", "group", "pages"), [(0, 1, 0), (1, 1, 1), (64, 1, 1), (65, 1, 2), (65, 2, 2), (129, 2, 4)]
)
def test_pages_for(tokens: int, group: int, pages: int) -> None:
    assert pages_for(tokens, group) == pages
