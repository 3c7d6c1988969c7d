"""FSDP, torch's own, of the first kind (FullyShardedDataParallel, flat shards) and the second (fully_shard, DTensors).

Shards of the second kind are DTensors, which every loop's keeper can save without a collective, also while ranks are blocked; here is only
where FSDP2 keeps them while its modules show the gathered parameters. Flat shards have no place in a checkpoint before they are gathered by
collectives: a held step can do that; of blocked ranks each writes its own part, and `holter checkpoint assemble` joins them (`parts`).
"""
