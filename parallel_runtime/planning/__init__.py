"""From a request, a network and measurements to a plan of the run. Starts nothing, and asks no device."""
