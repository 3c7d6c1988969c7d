"""What is measured in the rank: gradients, replicas, vitals, batches, where a NaN began."""
