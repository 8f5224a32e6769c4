"""Costs read from the text of compiled programs: products, traffic, loops, collectives, on programs that are known."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from train.hlo_costs import costs_of_text
from train.hlo_text import ArrayShape, read_program
from train.jaxpr_costs import product_flops
from train.partition import make_mesh

LAYERS, ROWS, WIDTH = 5, 16, 32


def text_of(function, *operands):
    return jax.jit(function).lower(*operands).compile().as_text()


def shape(*lengths, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(lengths, dtype)


def scanned(matrices, rows):
    return jax.lax.scan(lambda rows, matrix: (jnp.tanh(rows @ matrix), None), rows, matrices)[0]


def unrolled(matrices, rows):
    for matrix in matrices:
        rows = jnp.tanh(rows @ matrix)
    return rows


@pytest.mark.parametrize(("transform", "products"), [(jax.jit, 1), (jax.grad, 3)], ids=["value", "gradient"])
def test_a_loop_costs_what_its_turns_cost(transform, products):
    """Backward, two products a layer; a loop also makes the gradient by the first layer's input, which nobody reads."""
    function = transform(lambda *operands: scanned(*operands).sum())
    operands = shape(LAYERS, WIDTH, WIDTH), shape(ROWS, WIDTH)
    wanted = 2 * ROWS * WIDTH**2 * products * LAYERS
    costs = costs_of_text(text_of(function, *operands))
    assert costs.unknown_loops == 0
    assert costs.flops == product_flops(function, *operands) == wanted


def test_a_scan_and_the_same_layers_unrolled_have_the_same_products():
    operands = shape(LAYERS, WIDTH, WIDTH), shape(ROWS, WIDTH)
    one, other = (costs_of_text(text_of(function, *operands)) for function in (scanned, unrolled))
    assert one.flops == other.flops == 2 * LAYERS * ROWS * WIDTH**2


def test_stacked_parameters_are_read_a_layer_at_a_time():
    """Each turn reads one matrix: counted as the whole stack, five layers would be read twenty-five times."""
    costs = costs_of_text(text_of(scanned, shape(LAYERS, WIDTH, WIDTH), shape(ROWS, WIDTH)))
    matrices = LAYERS * WIDTH**2 * 4
    assert matrices <= costs.hbm_bytes <= 3.5 * matrices + LAYERS * 8 * ROWS * WIDTH * 4


def test_loops_inside_loops_multiply():
    def function(matrix, rows):
        inner = lambda rows, _: (jnp.tanh(rows @ matrix), None)
        outer = lambda rows, _: (jax.lax.scan(inner, rows, length=3)[0] + 1.0, None)
        return jax.lax.scan(outer, rows, length=7)[0]

    costs = costs_of_text(text_of(function, shape(WIDTH, WIDTH), shape(ROWS, WIDTH)))
    assert costs.flops == 21 * 2 * ROWS * WIDTH**2


def test_a_loop_whose_length_depends_on_data_is_told():
    def function(matrix, rows, count):
        return jax.lax.fori_loop(0, count, lambda _, rows: jnp.tanh(rows @ matrix), rows)

    costs = costs_of_text(text_of(function, shape(WIDTH, WIDTH), shape(ROWS, WIDTH), shape(dtype=jnp.int32)))
    assert costs.unknown_loops == 1 and costs.flops == 2 * ROWS * WIDTH**2


def test_branches_count_as_asked():
    def function(matrix, rows, flag):
        return jax.lax.cond(flag, lambda: rows @ matrix @ matrix, lambda: rows)

    text = text_of(function, shape(WIDTH, WIDTH), shape(ROWS, WIDTH), shape(dtype=jnp.bool_))
    assert costs_of_text(text, branch=max).flops == 4 * ROWS * WIDTH**2
    assert costs_of_text(text, branch=min).flops == 0


def test_collectives_of_a_known_program():
    """Rows over eight devices, a matrix in shards: it is gathered once a layer, and the sum is reduced once."""
    mesh = make_mesh({"fsdp": 8})
    place = lambda struct, *spec: jax.ShapeDtypeStruct(
        struct.shape, struct.dtype, sharding=NamedSharding(mesh, P(*spec))
    )

    def function(matrices, rows):
        def layer(rows, matrix):
            whole = jax.lax.with_sharding_constraint(matrix, NamedSharding(mesh, P()))
            return jax.lax.with_sharding_constraint(jnp.tanh(rows @ whole), NamedSharding(mesh, P("fsdp"))), None

        return jax.lax.scan(layer, rows, matrices)[0].sum()

    matrices, rows = shape(LAYERS, WIDTH, WIDTH), shape(ROWS, WIDTH)
    costs = costs_of_text(text_of(function, place(matrices, None, "fsdp"), place(rows, "fsdp")))
    kinds = {}
    for each, count in costs.collectives.items():
        assert each.group == 8
        kinds.setdefault(each.kind, []).append((count, each.bytes))
    gathered = sum(count * size for count, size in kinds["all-gather"])
    assert gathered == LAYERS * WIDTH**2 * 4
    assert kinds["all-reduce"] == [(1, 4)]
    assert costs.collective_bytes == gathered + 4
    assert costs.wire_bytes == pytest.approx(7 / 8 * gathered + 2 * 7 / 8 * 4)


def test_arrays_are_padded_to_tiles_and_fast_memory_is_told_apart():
    array = ArrayShape("bf16", (3, 10, 130), "2,1,0:T(8,128)(2,1)")
    assert array.bytes == 3 * 10 * 130 * 2 and array.padded_bytes == 3 * 16 * 256 * 2
    assert array.is_in_hbm and not ArrayShape("f32", (8, 128), "1,0:T(8,128)S(1)").is_in_hbm
    assert ArrayShape("s4", (9,), "0").bytes == 5 and ArrayShape("f8e4m3fn", (9,), "0").bytes == 9


# A fusion of a window that covers the batch, as the TPU compiler writes a batched product: 6 x (4 x 8) @ (8 x 5).
BATCHED = """
HloModule m
ENTRY %main (a: bf16[6,4,8], b: bf16[6,5,8]) -> f32[6,4,5] {
  %a = bf16[6,4,8]{2,1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[6,5,8]{2,1,0:T(8,128)(2,1)} parameter(1)
  ROOT %c = f32[6,4,5]{2,1,0:T(8,128)} convolution(%a, %b), window={size=6 stride=5 pad=0_0 lhs_dilate=6}, dim_labels=0bf_0oi->0bf
}
"""  # noqa: E501


def test_batched_products_written_as_convolutions_count_once_a_batch():
    assert costs_of_text(BATCHED).flops == 2 * 6 * 4 * 5 * 8


# A loop that the compiler unrolled: it counts in twos.
TWOS = """
HloModule m
%body (p: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {
  %p = (s32[], f32[4,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4,4]{1,0} get-tuple-element(%p), index=1
  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
  %k = s32[] add(%j, %one)
  %y = f32[4,4]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %z = f32[4,4]{1,0} dot(%y, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (s32[], f32[4,4]{1,0}) tuple(%k, %z)
}
%condition (p: (s32[], f32[4,4])) -> pred[] {
  %p = (s32[], f32[4,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(8)
  ROOT %goes = pred[] compare(%i, %n), direction=LT
}
ENTRY %main (x: f32[4,4]) -> f32[4,4] {
  %x = f32[4,4]{1,0} parameter(0)
  %two = s32[] constant(2)
  %t = (s32[], f32[4,4]{1,0}) tuple(%two, %x)
  %w = (s32[], f32[4,4]{1,0}) while(%t), condition=%condition, body=%body
  ROOT %r = f32[4,4]{1,0} get-tuple-element(%w), index=1
}
"""


def test_a_loop_that_counts_in_twos_from_two_turns_as_often_as_it_does():
    costs = costs_of_text(TWOS)
    assert costs.unknown_loops == 0 and costs.flops == 3 * 2 * 2 * 4**3


# One all-gather in two pieces of two fusions, as the TPU compiler hides it behind products.
PIECES = """
HloModule m
%first (p: f32[4]) -> (f32[4], f32[32]) {
  %p = f32[4]{0} parameter(0)
  %g = f32[32]{0} all-gather(%p), channel_id=7, replica_groups=mesh['a'=8,'b'=1] {'a'}, dimensions={0}
  ROOT %t = (f32[4]{0}, f32[32]{0}) tuple(%p, %g)
}
%second (p: f32[4]) -> (f32[4], f32[32]) {
  %p = f32[4]{0} parameter(0)
  %g = f32[32]{0} all-gather(%p), channel_id=7, replica_groups=mesh['a'=8,'b'=1] {'a'}, dimensions={0}
  ROOT %t = (f32[4]{0}, f32[32]{0}) tuple(%p, %g)
}
ENTRY %main (x: f32[4]) -> f32[32] {
  %x = f32[4]{0} parameter(0)
  %a = (f32[4]{0}, f32[32]{0}) fusion(%x), kind=kCustom, calls=%first
  %y = f32[4]{0} get-tuple-element(%a), index=0
  %b = (f32[4]{0}, f32[32]{0}) fusion(%y), kind=kCustom, calls=%second
  ROOT %r = f32[32]{0} get-tuple-element(%b), index=1
}
"""


def test_pieces_of_one_collective_count_once():
    costs = costs_of_text(PIECES)
    [(each, count)] = costs.collectives.items()
    assert (each.kind, each.bytes, each.group, count) == ("all-gather", 128, 8, 1)
    assert costs.hbm_bytes == 16 + 128


def test_a_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        read_program("HloModule nothing\n")


def test_shards_that_are_written_out_count_as_the_whole():
    """The traced body of a `shard_map` has the shapes of one shard."""
    mesh = make_mesh({"data": 4, "tensor": 2})
    product = lambda rows, matrix: rows @ matrix
    sharded = jax.shard_map(product, mesh=mesh, axis_names={"data"}, in_specs=(P("data"), P()), out_specs=P("data"))
    operands = shape(ROWS, WIDTH), shape(WIDTH, WIDTH)
    assert product_flops(sharded, *operands) == product_flops(product, *operands) == 2 * ROWS * WIDTH**2


def test_a_group_of_all_chips_sends_something():
    mesh = make_mesh({"data": 8})
    rows = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    text = text_of(lambda rows: rows.sum(0), rows)
    unnamed, replaced = re.subn(r"replica_groups=(.*?), (?=\w+=)", "replica_groups={}, ", text)
    assert replaced and costs_of_text(text).wire_bytes == 2 * 7 / 8 * 4 * WIDTH
    assert costs_of_text(unnamed).wire_bytes == 2 * 4 * WIDTH
