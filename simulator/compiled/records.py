"""Names for the arrays of compiled code: rows of a table by field, and records on the stack."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj

from simulator.compiled.jit import stamped

# their functions are not typed
_types: Any = types
_cgutils: Any = cgutils
_arrayobj: Any = arrayobj
_intrinsic: Any = intrinsic


@_intrinsic
@stamped
def named(typing, fields, table):
    """Returns ``fields(*table)``: a NamedTuple of the rows of an int64 table, or of the values of a 1-D array."""
    row = table.dtype if table.ndim == 1 else table.copy(ndim=table.ndim - 1)
    names = fields.instance_class._fields
    returned = _types.NamedUniTuple(row, len(names), fields.instance_class)

    def code(context, builder, signature, values):
        array = _arrayobj.make_array(table)(context, builder, values[1])
        _, *shape = _cgutils.unpack_tuple(builder, array.shape)
        step, *strides = _cgutils.unpack_tuple(builder, array.strides)
        rows = []
        for i in range(len(names)):
            data = _cgutils.pointer_add(builder, array.data, builder.mul(step, step.type(i)))
            if shape:
                view = _arrayobj.make_array(row)(context, builder)
                _arrayobj.populate_array(view, data, shape, strides, array.itemsize, None)
                rows.append(view._getvalue())
            else:
                rows.append(builder.load(data))
        return context.make_tuple(builder, returned, rows)

    return returned(fields, table), code


@_intrinsic(prefer_literal=True)
@stamped
def local(typing, dtype, count):
    """Returns an array of ``count`` zeroed records on the stack, whose fields LLVM may keep in registers.

    It is valid until the calling function returns, and ``count`` must be a literal.
    """
    returned = _types.Array(dtype.dtype, 1, "C")

    def code(context, builder, signature, values):
        record = context.get_data_type(dtype.dtype)
        itemsize = context.get_constant(_types.intp, context.get_abi_sizeof(record))
        shape = context.get_constant(_types.intp, count.literal_value)
        data = _cgutils.alloca_once(builder, record, size=shape)
        data.align = 16  # of bytes by default
        _cgutils.memset(builder, data, builder.mul(itemsize, shape), 0)
        array = _arrayobj.make_array(returned)(context, builder)
        data = builder.bitcast(data, array.data.type)
        _arrayobj.populate_array(array, data, [shape], [itemsize], itemsize, None)
        return array._getvalue()

    return returned(dtype, count), code
