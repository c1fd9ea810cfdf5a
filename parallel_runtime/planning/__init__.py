"""From a request, a network and measurements to a plan of the run. Arithmetic only."""
