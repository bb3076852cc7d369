//! Sorting, with one copy of its code in the program.
//!
//! The standard library has several KiB of code for each type of elements that a program sorts, 40 KB in this one. Here
//! it only sorts numbers of places; the elements follow.

use std::cmp::Ordering;
use std::mem;

/// Sorts a slice.
pub fn sort<T: Ord>(items: &mut [T]) {
    sort_by(items, T::cmp);
}

/// Sorts a slice by a comparison. Equal elements keep their order.
pub fn sort_by<T>(items: &mut [T], compare: impl Fn(&T, &T) -> Ordering) {
    let mut places = sorted(items.len(), &|one, other| {
        compare(&items[one], &items[other])
    });
    // A place that has its element names itself from then on.
    for start in 0..items.len() {
        let mut place = start;
        loop {
            let from = mem::replace(&mut places[place], place);
            if from == start {
                break;
            }
            items.swap(place, from);
            place = from;
        }
    }
}

/// Where the element for each place is.
fn sorted(count: usize, compare: &dyn Fn(usize, usize) -> Ordering) -> Vec<usize> {
    let mut places: Vec<usize> = (0..count).collect();
    places.sort_unstable_by(|one, other| compare(*one, *other).then(one.cmp(other)));
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_come_in_order() {
        // A generator that passes each number below the modulus once.
        let next = |number: &u32| Some(number * 5 % 1009);
        let numbers: Vec<u32> = std::iter::successors(Some(1), next).take(1008).collect();
        for count in [0, 1, 2, 3, 7, 40, 1008] {
            let mut expected = numbers[..count].to_vec();
            expected.sort_unstable();
            let mut found = numbers[..count].to_vec();
            sort(&mut found);
            assert_eq!(found, expected);
            // Of what is in order already, and the other way around; with equal elements.
            sort_by(&mut found, |one, other| (other / 3).cmp(&(one / 3)));
            assert!(found.is_sorted_by_key(|number| std::cmp::Reverse(number / 3)));
            sort(&mut found);
            sort(&mut found);
            assert_eq!(found, expected);
        }
    }
}
