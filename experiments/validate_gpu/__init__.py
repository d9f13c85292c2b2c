"""Commands that validate the simulator on a GPU; their parts: experiments/measure."""
