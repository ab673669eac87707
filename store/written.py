"""What is written on disk and not yet in the catalog: a node, or the two halves of one.

Owns the statements that publish it inside a transaction; `publish` decides what and when.
"""

from __future__ import annotations

from typing import NamedTuple

from store.disk.writer import WrittenGroup
from store.index.catalog import Transaction
from store.index.ids import pack_ids
from store.index.radix import PrefixNode
from store.index.rows import NodeRow, ProbeRow


class Written(NamedTuple):
    """A generation and sidecars that lie on disk and are not yet published."""

    group: WrittenGroup
    sidecars: list[ProbeRow]

    @property
    def size_bytes(self) -> int:
        """What all of it takes on disk."""
        return self.group.size_bytes + sum(row.bytes for row in self.sidecars)

    def publish(self, txn: Transaction, node: PrefixNode) -> None:
        """Put all of it in the catalog, inside the caller's transaction."""
        txn.put_node(_node_row(node, self.group))
        self.publish_sidecars(txn)

    def publish_sidecars(self, txn: Transaction) -> None:
        """Put the sidecars alone in the catalog."""
        for row in self.sidecars:
            txn.put_probe(row)


class Split(NamedTuple):
    """A split that is written and not yet published."""

    old: PrefixNode
    upper: PrefixNode
    lower: PrefixNode
    written: tuple[Written, Written]

    def publish(self, txn: Transaction) -> None:
        """Swap the old node for its halves, inside the caller's transaction."""
        old, upper, lower = self.old, self.upper, self.lower
        txn.reparent(old.node_id, lower.node_id)
        for node, half in zip((upper, lower), self.written, strict=True):
            half.publish(txn, node)
        txn.reassign_prefixes(old.node_id, upper.end, upper.node_id, lower.node_id)
        retire(txn, old.node_id, old.generation)
        txn.delete_node(old.node_id)


def retire(txn: Transaction, name: str, generation: int) -> None:
    """Make a generation garbage; the tombstone keeps its number from being used again."""
    txn.tombstone(name, generation)
    txn.retire(name, generation)


def _node_row(node: PrefixNode, written: WrittenGroup) -> NodeRow:
    parent = node.parent.node_id if node.parent else None
    return NodeRow(
        node.node_id,
        parent,
        node.start,
        node.length,
        pack_ids(node.first_ids),
        node.digest,
        node.generation,
        written.digest,
        written.size_bytes,
    )
