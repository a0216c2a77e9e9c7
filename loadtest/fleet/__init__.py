"""Several real daemons behind a real router: the load, the runs, and what the simulator foresees of them."""
