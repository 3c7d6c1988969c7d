"""The one process that sees all ranks: takes in what their sidecars report, judges across ranks, keeps and serves the incidents."""
