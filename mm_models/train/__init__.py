"""What a training run needs whichever target it is of: the step's micro-batches, what is printed, how it ends."""
