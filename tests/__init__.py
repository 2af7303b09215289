import os

# Before numpy and torch are imported, here and in every process that tests start: on a machine whose cores all work,
# threads that share a sum wait for each other many times as long as they compute.
os.environ["OMP_NUM_THREADS"] = "1"
