"""Blocks for the compiler: arrays whose places it counts from the beginning alone.

Python counts negative places from the end, so that compiled code looks at the sign of an index before it reads an
entry, and what it reads waits for that.  The order search, which follows indices from table to table, took a third
longer for it.  No index of a block may be negative, and nobody checks.

This module loads the compiler; `kernels.as_block` makes blocks where there is one.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numba.core import types
from numba.core.imputils import lower_builtin
from numba.extending import models, register_model, typeof_impl
from numba.np.arrayobj import load_item, make_array, store_item
from numba.np.numpy_support import from_dtype


class Block(np.ndarray[Any, Any]):
    """A contiguous array of one dimension."""


class BlockType(types.Array):
    """The compiler's type of a block."""

    def __init__(self, dtype: Any) -> None:
        super().__init__(dtype, 1, "C", name=f"Block({dtype})")


register_model(BlockType)(models.ArrayModel)


@typeof_impl.register(Block)
def type_of_block(values: Block, context: Any) -> BlockType:
    """The type of a block that is handed to compiled code."""
    return BlockType(from_dtype(values.dtype))


def _entry(context: Any, builder: Any, sig: Any, args: Any) -> tuple[BlockType, Any]:
    """The type of a block, and where the entry at a place of it lies."""
    block_type, place = sig.args[:2]
    array = make_array(block_type)(context, builder, args[0])  # type: ignore[no-untyped-call]
    return block_type, builder.gep(array.data, [context.cast(builder, args[1], place, types.intp)])


@lower_builtin(operator.getitem, BlockType, types.Integer)  # type: ignore[no-untyped-call, untyped-decorator]
def _load(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    """Read an entry."""
    return load_item(context, builder, *_entry(context, builder, sig, args))  # type: ignore[no-untyped-call]


@lower_builtin(operator.setitem, BlockType, types.Integer, types.Any)  # type: ignore[no-untyped-call, untyped-decorator]
def _store(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    """Write an entry."""
    block_type, pointer = _entry(context, builder, sig, args)
    value = context.cast(builder, args[2], sig.args[2], block_type.dtype)
    store_item(context, builder, block_type, value, pointer)  # type: ignore[no-untyped-call]
    return context.get_dummy_value()
