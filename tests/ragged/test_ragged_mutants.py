def test_garbage_that_is_not_masked_is_caught(monkeypatch):
    monkeypatch.setattr(_ragged_dot, "_in_a_group", lambda x, sizes: x)
    with pytest.raises(AssertionError):
        compare_steps(steps=2)


@pytest.mark.parametrize("wrong", ["group_sizes", "scale"])
def test_wrong_gemms_are_caught(monkeypatch, wrong):
    original = ops.ragged_matmul

    def mutant(a, b, a_scale_inv, b_scale_inv, group_sizes, **options):
        if wrong == "group_sizes":
            group_sizes = group_sizes[::-1]
        else:  # that of one operand twice
            b_scale_inv = a_scale_inv
        return original(a, b, a_scale_inv, b_scale_inv, group_sizes, **options)

    monkeypatch.setattr(ops, "ragged_matmul", mutant)
    with pytest.raises(AssertionError, match="out of bound"):
        compare_steps(steps=2)  # from the second on, scales are not 1


def test_a_sum_of_states_is_caught(monkeypatch):
    monkeypatch.setattr(_ragged_dot, "shared", lambda state: state)
    with pytest.raises(AssertionError, match="scale|amax_history"):
        compare_two_calls()


def test_a_sum_over_members_is_caught(monkeypatch):
    monkeypatch.setattr(
        _vmapped_state, "repeat_state", lambda size, leaf: jnp.broadcast_to(leaf, (size[0], *leaf.shape))
    )
    with pytest.raises(AssertionError, match="scale|amax_history"):
        test_vmap("rhs and state")
