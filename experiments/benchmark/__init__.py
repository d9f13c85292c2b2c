"""Command that benchmarks agents and times the code base; the timings: experiments/measure/speed."""
