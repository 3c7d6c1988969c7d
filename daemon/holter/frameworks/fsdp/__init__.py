"""torch's FSDP, both kinds: FSDP1 (FullyShardedDataParallel, flat shards) and FSDP2 (fully_shard, DTensors).

Shards of FSDP2 are DTensors, which every loop's keeper can save without a collective, even while ranks are blocked;
this folder only adds where FSDP2 keeps them while its modules show the gathered parameters. FSDP1's flat shards have no
place in a checkpoint before they are gathered by collectives: a held step can do that; of blocked ranks each writes its
own part, and `holter checkpoint assemble` joins them (`parts`).
"""
