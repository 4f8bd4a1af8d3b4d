"""What a run can switch on: recompute, activation offload, determinism, profiling. Each file is one switch."""
