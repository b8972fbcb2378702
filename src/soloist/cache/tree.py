"""The tree under the prefix cache: one node per grid block of tokens, shared prefixes stored once.

A node stands for all tokens from the root to its block. Its data may be in several places at once: pages
in the GPU pool, a host copy, a session file. A node may only vanish together with everything below it,
because what lies below is of no use without it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from soloist.cache.snapshot import Snapshot


class Node:
    """One block. `length` counts the tokens from the root to the block's end; `digest` names that whole prefix.

    pages      page ids in the GPU pool (the tree holds one reference each), or None
    host       exported planes in host memory, or None
    saved      (session segment, first token of the block inside it), or None
    snapshot   state at `length` in host memory, or None
    saved_state  the session segment that holds the state at `length`, or None
    stamp      eviction priority of the snapshot, set when it was last used
    """

    __slots__ = (
        "children", "digest", "dropped", "host", "key", "length", "pages", "parent", "pending",
        "saved", "saved_state", "snapshot", "stamp",
    )  # fmt: skip

    def __init__(self, key: bytes, parent: Node | None, length: int, digest: bytes) -> None:
        self.key = key
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.length = length
        self.digest = digest
        self.pages: tuple[int, ...] | None = None
        self.host: dict[str, Any] | None = None
        self.saved: tuple[Any, int] | None = None
        self.snapshot: Snapshot | None = None
        self.saved_state: Any | None = None
        self.pending = False
        self.dropped = False
        self.stamp = 0.0

    @property
    def present(self) -> bool:
        """The block's KV exists somewhere."""
        return self.pages is not None or self.host is not None or self.saved is not None

    @property
    def resumable(self) -> bool:
        """A request can start right after this block."""
        return self.snapshot is not None or self.saved_state is not None

    def child(self, key: bytes) -> Node:
        """The child for the block `key`, made if it does not exist."""
        node = self.children.get(key)
        if node is None:
            node = self.children[key] = Node(key, self, self.length + len(key) // 8, _follow(self.digest, key))
        return node

    def subtree(self) -> Iterator[Node]:
        """This node and all below it, parents first."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def path(self) -> list[Node]:
        """Nodes from the first block to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


def _follow(digest: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(digest + key, digest_size=16).digest()


def chain(parent: bytes, tokens: array[int], grid: int) -> list[bytes]:
    """Digests of the blocks of `tokens` after the prefix `parent`, as the nodes of the tree have them."""
    digests: list[bytes] = []
    raw = tokens.tobytes()
    for at in range(0, len(raw), grid * 8):
        parent = _follow(parent, raw[at : at + grid * 8])
        digests.append(parent)
    return digests


def root(salt: str, content: str = "") -> Node:
    """A root of its own for every cache salt. Only the digest is ever written to disk, never the salt."""
    return root_for(hashlib.blake2b(f"{salt}\0{content}".encode(), digest_size=16).digest())


def root_for(digest: bytes) -> Node:
    return Node(b"", None, 0, digest)


class Trail:
    """One token sequence and how far it has been followed into the tree.

    Token ids are signed 64-bit; an image's placeholder positions carry words of its content hash instead of the
    placeholder id, so equal text with another picture is another sequence. Tokens may be appended, never changed.
    """

    def __init__(self, start: Node, tokens: Sequence[int], grid: int) -> None:
        self.root = start
        self.grid = grid
        self._raw = bytearray(array("q", tokens).tobytes())
        self._nodes: list[Node] = []

    def __len__(self) -> int:
        return len(self._raw) // 8

    def extend(self, tokens: Sequence[int]) -> None:
        self._raw += array("q", tokens).tobytes()

    def key(self, block: int) -> bytes:
        """Bytes of the tokens of grid block `block`."""
        width = self.grid * 8
        return bytes(self._raw[block * width : (block + 1) * width])

    def tokens(self, start: int, end: int) -> array[int]:
        return array("q", bytes(self._raw[start * 8 : end * 8]))

    def follow(self, blocks: int, create: bool = False) -> list[Node]:
        """Nodes of the first `blocks` blocks that exist (all of them with `create`)."""
        while self._nodes and self._nodes[-1].dropped:
            self._nodes.pop()
        while len(self._nodes) < blocks:
            here = self._nodes[-1] if self._nodes else self.root
            key = self.key(len(self._nodes))
            node = here.child(key) if create else here.children.get(key)
            if node is None:
                break
            self._nodes.append(node)
        return self._nodes[:blocks]
