"""The stand-in beside NVIDIA's library, of which descriptors work without a GPU."""

import ctypes

KINDS = {
    "MatmulDesc": (68, 0),  # CUBLAS_COMPUTE_32F, CUDA_R_32F
    # CUDA_R_8F_E4M3
    "MatrixLayout": (28, ctypes.c_uint64(32), ctypes.c_uint64(16), ctypes.c_int64(32)),
    "MatmulPreference": (),
}


def attribute_sizes(folder, path):
    """The stand-in wants each attribute in as many bytes as the library in `path`
    does.
    """
    fake, real = (
        _sizes(ctypes.CDLL(str(library)))
        for library in (folder / "libcublasLt.so.13", path)
    )
    known = {attribute for attribute, sizes in fake.items() if sizes}
    assert len(known) == 18, known
    assert {attribute: real[attribute] for attribute in known} == {
        attribute: fake[attribute] for attribute in known
    }


def _sizes(library) -> dict:
    """By kind of object and number of attribute: the sizes that are accepted."""
    sizes = {}
    for kind, arguments in KINDS.items():
        made = ctypes.c_void_p()
        assert (
            getattr(library, f"cublasLt{kind}Create")(ctypes.byref(made), *arguments)
            == 0
        )
        set_attribute = getattr(library, f"cublasLt{kind}SetAttribute")
        for attribute in range(50):
            value = ctypes.create_string_buffer(b"\1" + bytes(15))
            accepted = (
                n
                for n in (1, 2, 4, 8, 16)
                if set_attribute(made, attribute, value, ctypes.c_size_t(n)) == 0
            )
            sizes[kind, attribute] = list(accepted)
    return sizes
