"""One file an operation: a Triton kernel beside its torch twin.

Keep this file free of ``__version__`` and of any triton import: transformers probes for a package named ``kernels``.
"""
