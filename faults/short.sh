#!/usr/bin/env bash
# Runs the short form of every fault rig, in less than four minutes on two
# cores. A rig that cannot run fails, and so does a rig that is missing here.
#
#   faults/short.sh                all
#   faults/short.sh crash outage   only these
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
GOGC=400 go build -o "$bin/" ./cmd/edge ./cmd/hub ./faults/... || exit 1
GOGC=400 go build -tags small_budgets -o "$bin/edge-small" ./cmd/edge || exit 1

declare -A known
failed=() started=$SECONDS wanted=("$@")

# rig NAME LIMIT ARGUMENTS: runs a rig that was built, for LIMIT seconds at most.
rig() {
	local name=$1 limit=$2 t=$SECONDS rc=0
	shift 2
	known[$name]=1
	if ((${#wanted[@]})) && [[ " ${wanted[*]} " != *" $name "* ]]; then
		return
	fi
	echo "== $name $*"
	timeout --kill-after=10 "$limit" "$bin/$name" "$@" </dev/null || rc=$?
	echo "== $name: exit $rc after $((SECONDS - t)) s"
	if ((rc)); then
		failed+=("$name $*")
	fi
}

programs=(-edge "$bin/edge" -hub "$bin/hub")
rig crash 150 -kills 9 -edge "$bin/edge-small"
rig metamorph 150 -rounds 3 -ops 60 -seed 1 -edge "$bin/edge-small"
rig powercut 150 -cycles 6 "${programs[@]}"
rig powercut 150 -cycles 4 -fs xfs "${programs[@]}"
rig mutants 240 -rigs "$bin"
rig sweep 150 -most 16 -modes kill,torn,EIO -edge "$bin/edge"
# Every class once. The same damages each time, as far as two runs write the same stores.
rig bitflip 150 -flips 30 -turns -seed 20 -edge "$bin/edge-small" -hub "$bin/hub"
rig diskfull 150 -size 128 -hold 300ms -rounds 1 -edge "$bin/edge"
rig stall 150 -freeze 6s -rounds 3 -slow 2s -edge "$bin/edge"
rig rollback 150 -rounds 1 -rows 500 "${programs[@]}"
rig scale 150 -case streams -streams 40 -minutes 0.02 "${programs[@]}" # the others take long
rig badinput 150 -noise 1s -conns 300 "${programs[@]}"
rig outage 240 -short "${programs[@]}"

for dir in faults/*/; do
	name=$(basename "$dir")
	if [[ -e $dir/main.go && -z ${known[$name]:-} ]]; then
		failed+=("$name is not run by faults/short.sh")
	fi
done
echo "fault rigs: $((SECONDS - started)) s"
if ((${#failed[@]})); then
	printf 'FAILED: %s\n' "${failed[@]}"
	exit 1
fi
