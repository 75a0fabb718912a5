"""PowerSGD: the algorithm, its kernels, its state by parameter name."""
