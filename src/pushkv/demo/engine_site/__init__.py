"""What an engine's interpreter does first when it is measured: see `sitecustomize`."""
