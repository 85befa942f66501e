"""The commands that run a model or load a server themselves: `bench`, `simulate`, `tune`.

They load the offline engine and the load generators, which takes 0.1 s: `main` imports this module for them alone.
"""

from blockyard.services.bench import command as bench
from blockyard.services.bench import simulate
from blockyard.services.offline import tune

MAINS = {"bench": bench.main, "simulate": simulate.main, "tune": tune.main}
