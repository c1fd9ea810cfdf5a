"""One attention over ranks that each hold a part of the tokens: ring, Ulysses, merge, masks; and its kernels."""
