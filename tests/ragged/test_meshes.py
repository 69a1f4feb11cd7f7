@pytest.mark.parametrize(
    "lhs_spec, rhs_spec",
    [
        (P("x"), P()),
        (P(None, "x"), P(None, "x")),
        (P(), P("x")),
        (P(), P(None, None, "x")),
        (P("x"), P(None, None, "y")),
    ],
)
@pytest.mark.varied
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_meshes(lhs_spec, rhs_spec, axis_type):
    """Where a group begins depends on all sizes: cut along rows or groups, operands are gathered, never cut through."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis_type,) * 2, devices=jax.devices()[:4])
    lhs, rhs, grad = operands(4)
    sizes = [30, 7, 0, 40]
    expected = oracle.ragged_step(lhs, rhs, sizes, grad, oracle.LayerState.init(HISTORY))
    lhs, rhs = (jax.device_put(x, NamedSharding(mesh, s)) for x, s in ((lhs, lhs_spec), (rhs, rhs_spec)))

    @jax.jit
    def step(lhs, rhs, grad, state):
        def product(lhs, rhs, state):
            return jaxfp8.ragged_dot(lhs, rhs, jnp.int32(sizes), recipe=RECIPE, state=state)

        y, vjp = jax.vjp(product, lhs, rhs, state)
        if axis_type is AxisType.Explicit:
            grad = jax.sharding.reshard(grad, jax.typeof(y).sharding)
        return (y, *vjp(grad))

    with jax.set_mesh(mesh):
        assert_step(step(lhs, rhs, grad, jaxfp8.init_state(RECIPE)), expected, "mesh")


def test_experts_on_devices():
    """shard_map: each device has experts and rows of its own, and all share one state."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("expert",))
    lhs, rhs, grad = operands(3, shape=(2,))
    sizes = np.int32([[10, 33, 7], [50, 0, 40]])
    lhs[1] *= 3

    def products(lhs, rhs, sizes, state):
        return jaxfp8.ragged_dot(lhs[0], rhs[0], sizes[0], recipe=RECIPE, state=state)[None]

    each = P("expert")
    product = jax.shard_map(products, mesh=mesh, in_specs=(each, each, each, P()), out_specs=each)

    @jax.jit
    def step(lhs, rhs, state):
        y, vjp = jax.vjp(lambda lhs, rhs, state: product(lhs, rhs, sizes, state), lhs, rhs, state)
        return (y, *vjp(jnp.asarray(grad)))

    y, dlhs, drhs, state = step(lhs, rhs, jaxfp8.init_state(RECIPE))
    init = oracle.LayerState.init(HISTORY)
    steps = [oracle.ragged_step(lhs[i], rhs[i], sizes[i], grad[i], init) for i in range(2)]
    for i, expected in enumerate(steps):
        for got, name in ((y, "y"), (dlhs, "dgrad"), (drhs, "wgrad")):
            getattr(expected, name).check(got[i], f"{name} on device {i}")
    assert_state(state, merged([s.state for s in steps]), "shard_map")


