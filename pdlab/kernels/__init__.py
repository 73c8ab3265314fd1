"""Model operations: one kernel family a file, the plain-PyTorch oracle (`reference`), and the dispatch between them."""
