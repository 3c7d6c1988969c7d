#!/usr/bin/env bash
# Makes dashboard.schema.json from Grafana's published types. Needs npm; run when the versions below change, and commit the result.
set -euo pipefail
cd "$(dirname "$0")"
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cp dashboard.ts "$place"
(
  cd "$place"
  npm install --silent --no-audit --no-fund --ignore-scripts @grafana/schema@13.2.3 ts-json-schema-generator@2.9.0
  # Of this one only the type of a query is wanted, not the hundred packages it depends on.
  mkdir -p node_modules/@grafana/prometheus
  tar xzf "$(npm pack --silent @grafana/prometheus@13.1.4)" -C node_modules/@grafana/prometheus --strip-components 1
  npx ts-json-schema-generator --path dashboard.ts --type HolterDashboard --no-type-check --expose none --jsDoc none --minify --out dashboard.schema.json
)
cp "$place/dashboard.schema.json" .
