"""The networks that classification workloads are trained with, and their layers."""
