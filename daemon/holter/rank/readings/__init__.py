"""What is measured in the rank: gradients, replicas, vitals, batches, and where a NaN began."""
