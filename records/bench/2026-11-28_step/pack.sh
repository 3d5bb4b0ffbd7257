# Before a card is had: makes .gpu, which goes to it with the working tree (git must ignore it: .git/info/exclude).
#     NANOGPT=FOLDER bash records/bench/2026-11-28_step/pack.sh
# NANOGPT: a git repository of karpathy/nanoGPT. TIKTOKEN_CACHE_DIR: GPT-2's vocabulary. PLACE: a folder instead of .gpu
set -eu
cd "$(dirname "$0")/../../.."
here=$PWD/records/bench/2026-11-28_step place=${PLACE:-.gpu}
mkdir -p $place/versions $place/nanoGPT/data/mine $place/tiktoken
place=$(realpath $place)
cp "$TIKTOKEN_CACHE_DIR"/* $place/tiktoken/
git --git-dir="$NANOGPT" archive HEAD train.py model.py configurator.py | tar -x -C $place/nanoGPT
[ -f $place/data/meta.json ] || python3 data/prepare.py python --tokenizer gpt2 --out $place/data

# Each version's source
grep -v "^#" $here/versions.txt | while read -r name commit changes; do
    folder=$place/versions/$name
    rm -rf $folder && mkdir $folder
    git archive $commit -- . ":!docs" ":!records/*/*" | tar -x -C $folder
    for change in $changes; do
        case $change in
        *.patch) cat $here/$change ;;
        *..*) git diff $change -- "*.py" ":!records" ;;
        *) git show $change -- "*.py" ":!records" ;;
        esac | patch -s -p1 -d $folder
    done
    echo "$name: $(git rev-parse --short $commit) $changes" | tee $folder/VERSION
done
du -sh $place
