"""One file an operation: its torch twin, and its Triton kernel beside it. Those that have one in C: ``native.py``.

Keep this file free of ``__version__`` and of any triton import: transformers probes for a package named ``kernels``.
"""
