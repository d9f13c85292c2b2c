"""Pairing heaps (Fredman, Sedgewick, Sleator, Tarjan, 1986) of the rows of a plan; the root has the smallest key.

Most rows are last in, first out, which takes constant time; otherwise time is logarithmic in the number of rows. A row
may be in one heap at a time; all heaps share the links.

child, sibling: int64 (rows,), first child of a row in a heap, and next child of its parent; -1: none. The child of a
row outside all heaps is OUTSIDE.
"""

from __future__ import annotations

from simulator.compiled.jit import stage

OUTSIDE = -2


@stage
def meld(keys, child, sibling, left, right):
    """Merges two heaps and returns the root; -1 is an empty heap."""
    if left < 0 or right < 0:
        return max(left, right)
    root, child_root = (left, right) if keys[left] <= keys[right] else (right, left)
    sibling[child_root] = child[root]
    child[root] = child_root
    return root


@stage
def push(keys, child, sibling, root, row):
    """Adds ``row`` to the heap with this root (-1: empty) and returns the new root."""
    child[row] = -1
    return meld(keys, child, sibling, root, row)


@stage
def pop(keys, child, sibling, root):
    """Removes the root and returns the new one."""
    row = child[root]
    pairs = -1
    child[root] = OUTSIDE
    if row < 0 or sibling[row] < 0:
        return row
    while row >= 0:
        left = row
        right = sibling[row]
        row = sibling[right] if right >= 0 else -1
        pair = meld(keys, child, sibling, left, right)
        sibling[pair] = pairs
        pairs = pair
    root = -1
    while pairs >= 0:
        pair = pairs
        pairs = sibling[pairs]
        root = meld(keys, child, sibling, root, pair)
    return root
